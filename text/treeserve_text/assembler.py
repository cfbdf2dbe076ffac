"""Releases generated tokens with their text once no stop string can take them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from treeserve_text.detokenizer import Detokenizer
from treeserve_text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Released:
    """Tokens that are certain, and exactly their text."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class _HeldToken:
    """A token not yet released and the characters [start, end) of the whole text it contributes to.

    A character split over tokens belongs to all of them. Special tokens have none: start == end.
    """

    token_id: int
    start: int
    end: int


class TextAssembler:
    """Assembles a generation's text and finds its first stop string.

    The stop string that is complete first wins (of two that end together, the longer). The text ends before it, and the
    ids end with the last token that lies before it or contributes to the kept text. The result depends neither on how
    tokens are chunked nor on how the text is cut into tokens. Work per token is proportional to its text.

    Args:
        stop_strings: none may be empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matchers = [_StopMatcher(stop) for stop in stop_strings]
        self._held: deque[_HeldToken] = deque()
        self._held_text = ""
        self._length = 0  # characters of the whole text so far; the held ones are its last
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; nothing pushed afterwards counts."""
        return self._stopped

    def push(self, token_ids: Iterable[int]) -> Released:
        """Take generated tokens and release what became certain."""
        if not self._matchers and not self._held:  # nearly always all of it, and at once
            token_ids = tuple(token_ids)
            text = self._detokenizer.push_whole(token_ids)
            if text is not None:
                self._length += len(text)
                return Released(token_ids, text)
        return _joined([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> Released:
        """The generation ended by itself: release everything held back."""
        if self._stopped is not None:
            return Released()
        stop_start = self._append(self._detokenizer.flush())
        return self._release(self._length if stop_start is None else stop_start)

    def _push_one(self, token_id: int) -> Released:
        if self._stopped is not None:
            return Released()
        start = self._length
        text = self._detokenizer.push((token_id,))
        stop_start = self._append(text)
        end = start + len(text) + self._detokenizer.inside_character
        self._held.append(_HeldToken(token_id, start, end))
        if stop_start is not None:
            return self._release(stop_start)
        return self._release(self._length - max((m.matched for m in self._matchers), default=0))

    def _append(self, text: str) -> int | None:
        """Add text up to the end of the first stop string; return where that begins, or None if there is none."""
        for count, char in enumerate(text if self._matchers else "", start=1):
            complete = [m.stop for m in self._matchers if m.advance(char)]
            if complete:
                self._stopped = max(complete, key=len)
                self._held_text += text[:count]
                self._length += count
                return self._length - len(self._stopped)
        self._held_text += text
        self._length += len(text)
        return None

    def _release(self, certain: int) -> Released:
        """Release the tokens that lie within the first `certain` characters of the whole text.

        After a stop string that is all the text there is, so a token that begins within it and reaches beyond goes too.
        """
        token_ids = []
        text_end = text_start = self._length - len(self._held_text)
        while self._held:
            token = self._held[0]
            if token.end > certain and (self._stopped is None or token.start >= certain):
                break
            token_ids.append(token.token_id)
            text_end = max(text_end, min(token.end, certain))
            self._held.popleft()
        text = self._held_text[: text_end - text_start]
        self._held_text = self._held_text[text_end - text_start :]
        if self._stopped is not None:
            self._held.clear()
        return Released(tuple(token_ids), text)


class _StopMatcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt).

    Attributes:
        matched: length of the longest beginning of the string that the stream ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0]  # for each length >= 1, the longest shorter beginning that is also its end
        for char in stop[1:]:
            length = self._fallback[-1]
            while length and stop[length] != char:
                length = self._fallback[length - 1]
            self._fallback.append(length + (stop[length] == char))

    def advance(self, char: str) -> bool:
        """Take one character; True if it completes the string. Not called again after that."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)


def _joined(pieces: list[Released]) -> Released:
    return Released(
        tuple(token_id for piece in pieces for token_id in piece.token_ids), "".join(piece.text for piece in pieces)
    )
