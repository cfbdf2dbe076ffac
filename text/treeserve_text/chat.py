"""Renders conversations with the model's own Jinja template, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treeserve_core.errors import InvalidArgumentError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled chat template, run as transformers runs it: same environment, functions and variables.

    Args:
        source: the template's text.
        named_tokens: variables such as ``bos_token``.
        now: the clock of ``strftime_now``.

    Raises:
        InvalidArgumentError: if the template does not compile.
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgumentError("model", f"its chat template does not compile: {error}") from error
        self._named_tokens = dict(named_tokens)

    @classmethod
    def from_folder(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a checkpoint: chat_template.jinja, or the one in tokenizer_config.json; None if neither.

        Args:
            settings: the folder's tokenizer_config.json.
        """
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        tokens = {name: settings[name] for name in _NAMED_TOKENS if settings.get(name) is not None}
        return cls(source, {name: t["content"] if isinstance(t, dict) else t for name, t in tokens.items()})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation, ending where the assistant's answer begins.

        Raises:
            InvalidArgumentError: if there are no messages or the template refuses them.
        """
        if not messages:
            raise InvalidArgumentError("messages", "is empty")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        # A template is the model author's code: what it trips over, it trips over because of these messages.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidArgumentError("messages", f"the model's chat template refuses them: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}...{% endgeneration %}, which only marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's content, as if it stood without the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Unlike Jinja's own filter, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
