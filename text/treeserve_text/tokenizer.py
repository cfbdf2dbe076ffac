"""A model's tokenizer and chat template, loaded from its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from treeserve_core.errors import InvalidArgumentError
from treeserve_text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from treeserve_text.chat import ChatTemplate


class Tokenizer:
    """Text to token ids and back, as the model's own files say. Stateless in use and safe to share between threads.

    Attributes:
        vocab_size: one more than the highest token id.
        eos_token_ids: ids that end a generation, ascending; empty if the model names none.
        special_ids: ids that carry structure, not text (an end-of-turn mark); decoding leaves them out.
        hash: SHA-256 (hex) over the vocabulary, merges and added tokens: under equal hashes every id means the same.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int], folder: Path) -> None:
        spec, model = _parts(backend.to_str())
        self._backend = backend
        self._folder = folder
        self._token_bytes = TokenBytes.from_decoder(spec["decoder"])
        self._known_bytes: dict[int, bytes] = {}  # of tokens that were asked for
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.special_ids = frozenset(token["id"] for token in spec["added_tokens"] if token["special"])
        self.hash = hashlib.sha256(json.dumps([model, spec["added_tokens"]]).encode()).hexdigest()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load a checkpoint's tokenizer.json and end-of-sequence ids.

        Raises:
            InvalidArgumentError: if tokenizer.json is missing or broken, or cannot be decoded token by token.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgumentError("model", f"{folder} holds no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InvalidArgumentError("model", f"{path} cannot be read: {error}") from error
        backend.no_padding()
        backend.no_truncation()  # a length stored in the file would silently drop the end of long prompts
        return cls(backend, _eos_token_ids(folder, backend), folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. BOS is added only if the tokenizer's own post-processor does."""
        return self._encode(text)

    def encode_inner(self, text: str) -> list[int]:
        """Token ids of a text that others stand around: no BOS."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD. Unknown ids are left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own format, ending where the assistant's answer begins.

        Args:
            messages: each with "role" and "content", in order.

        Raises:
            InvalidArgumentError: if the model has no chat template or its template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidArgumentError("messages", "the model has no chat template")
        # The template writes BOS itself where the model wants it.
        return self._encode(self._chat_template.render(messages), add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, which need not be whole characters; nothing for special and unknown ids."""
        known = self._known_bytes.get(token_id)
        if known is not None:
            return known
        token = None if token_id in self.special_ids else self._backend.id_to_token(token_id)
        return b"" if token is None else self._known_bytes.setdefault(token_id, self._token_bytes.of(token))

    @property
    def strips_first_space(self) -> bool:
        """Whether the text's leading space is an artefact of the tokenizer, which decoding removes."""
        return self._token_bytes.strips_first_space

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The library's plain encode keeps the GIL: a long text would stop every other thread for as long as it takes.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        # Loaded when first used: only the router renders chats, and only its installation has jinja2 for certain.
        from treeserve_text.chat import ChatTemplate

        return ChatTemplate.from_folder(self._folder, _read_json(self._folder / "tokenizer_config.json"))


def _parts(text: str) -> tuple[dict[str, Any], str]:
    """A tokenizer as the library writes it, always alike: all but the model, parsed, and the model's own text.

    The model (vocabulary and merges) is megabytes and comes last; parsing it would take most of a service's start.
    """
    rest, _, model = text.partition(',"model":')
    return json.loads(rest + "}"), model


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("model", f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError("model", f"{path} is not a JSON object")
    return value


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer) -> list[int]:
    """The ids that end a generation, from the first file that names any, as transformers' generate looks for them."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    token_id = backend.token_to_id(content) if content else None
    return [] if token_id is None else [token_id]
