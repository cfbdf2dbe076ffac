"""Turns a growing list of token ids into text as early as it is certain."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from treeserve_text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding: all that is pushed, and then flushed, gives `Tokenizer.decode` of the same ids.

    A character split over tokens appears with the token that completes it; U+FFFD appears only for bytes that no
    further token can mend. Work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = tokenizer.strips_first_space

    @property
    def inside_character(self) -> bool:
        """Whether the last token ended within a character that is held back."""
        return len(self._decoder.getstate()[0]) > 0

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""
        return self._stripped(self._decoder.decode(self._bytes(token_ids)))

    def push_whole(self, token_ids: Iterable[int]) -> str | None:
        """`push` of tokens with whole characters only; None, and nothing is pushed, if one would be split."""
        data = self._bytes(token_ids)
        text, used = codecs.utf_8_decode(data, "replace", False)
        return None if self.inside_character or used < len(data) else self._stripped(text)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _bytes(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, token_ids))

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
