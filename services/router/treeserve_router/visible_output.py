"""What a client may see of a generation: ids, text and log-probabilities that end together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.outcome import PositionLogProbs
from treeserve_text.assembler import Released, TextAssembler
from treeserve_text.detokenizer import Detokenizer
from treeserve_text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenChunk:
    """Tokens in order. `offset` is the output position of the first; log_probs is empty or has one entry per token."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[PositionLogProbs, ...] = ()


class VisibleOutput:
    """Releases tokens as the assembler finds them certain, and keeps the log-probabilities of those it holds back.

    Args:
        delivered: tokens the client has already (a resume). They prime the assembler, and nothing of them is released
            again, even where the assembler would hold back their end.
        num_delivered: how many tokens the client has, if that is more: the next ones pushed are of them, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: tuple[str, ...], delivered: Sequence[int], num_delivered: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._assembler = TextAssembler(tokenizer, stop_strings)
        self._delivered = list(delivered)
        self._missing = max(num_delivered - len(delivered), 0)  # tokens the client has that are not known here yet
        self._offset = len(delivered) + self._missing
        self._surplus_tokens = self._surplus_chars = 0
        self._surplus_replacement = False
        self._log_probs: deque[PositionLogProbs] = deque()
        if not self._missing:
            self._prime()

    @property
    def num_tokens(self) -> int:
        """Output tokens the client has once it has all chunks."""
        return self._offset

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._assembler.stopped

    def push(self, token_ids: Sequence[int], log_probs: Sequence[PositionLogProbs] = ()) -> TokenChunk | None:
        """Take new tokens; what became certain, or None. `log_probs` has one entry per token, or none ever."""
        if known := min(self._missing, len(token_ids)):
            self._delivered += token_ids[:known]
            self._missing -= known
            token_ids, log_probs = token_ids[known:], log_probs[known:]
            if not self._missing:
                self._prime()
        if self._missing:
            return None
        self._log_probs.extend(log_probs)
        return self._chunk(self._assembler.push(token_ids))

    def flush(self) -> TokenChunk | None:
        """The generation ended by itself: whatever was held back, or None.

        Raises:
            InvalidArgumentError: if it ended before the tokens that the client says it has.
        """
        if self._missing:
            raise InvalidArgumentError("resume.offset", f"the output has {len(self._delivered)} tokens")
        return self._chunk(self._assembler.flush())

    def _prime(self) -> None:
        """All that the client has is known: what comes now is new to it."""
        released = self._assembler.push(self._delivered)
        self._surplus_tokens = len(self._delivered) - len(released.token_ids)
        detokenizer = Detokenizer(self._tokenizer)
        self._surplus_chars = len(detokenizer.push(self._delivered)) - len(released.text)
        # Its last bytes were released as U+FFFD: only the next token, which was still held back, made that certain.
        self._surplus_replacement = detokenizer.inside_character

    def _chunk(self, released: Released) -> TokenChunk | None:
        token_ids = released.token_ids[self._surplus_tokens :]
        text = released.text[self._surplus_chars :]
        self._surplus_tokens = max(self._surplus_tokens - len(released.token_ids), 0)
        self._surplus_chars = max(self._surplus_chars - len(released.text), 0)
        if text and self._surplus_replacement:
            self._surplus_replacement = False
            text = text.removeprefix("\ufffd")
        if not token_ids and not text:
            return None
        log_probs = tuple(self._log_probs.popleft() for _ in token_ids) if self._log_probs else ()
        chunk = TokenChunk(self._offset, token_ids, text, log_probs)
        self._offset += len(token_ids)
        return chunk
