"""Whether a sequence repeats an earlier passage of its own, found by following that passage, without drafting."""

from __future__ import annotations

from collections.abc import Sequence

_SIZE = 3  # tokens that must occur again before what followed them is taken for what comes next
_LEAST = 4  # tokens that must then come as they came before, for more to be expected

_Gram = tuple[int, ...]


class Echo:
    """Follows the passage that a sequence repeats at present.

    Attributes:
        length: tokens in a row that came as they had come after the same `_SIZE` tokens before.
    """

    def __init__(self) -> None:
        self.length = 0
        self._needed = _LEAST
        self._next: dict[_Gram, int] = {}  # where the token after an n-gram stood last
        self._read = 0  # tokens that were read
        self._expected: int | None = None  # place of the token that comes next if the passage goes on

    @property
    def expected(self) -> int:
        """Tokens that should come as they came before: as many as have. An echo that proves nothing must grow first."""
        return self.length if self.length >= self._needed else 0

    def used(self) -> None:
        """A tree is asked for because of it. Unless that is `proved` right, the next one must be twice as long."""
        self._needed *= 2

    def proved(self) -> None:
        """A tree came true."""
        self._needed = _LEAST

    def restart(self) -> None:
        """Count from nothing again."""
        self.length, self._expected = 0, None

    def follow(self, tokens: Sequence[int], base_len: int) -> None:
        """Tokens were committed after `base_len`; all of the sequence are given, and those before it are only read."""
        if self._read < base_len:
            first = max(self._read, _SIZE)
            part = tokens[first - _SIZE : base_len]
            grams = zip(*(part[i:] for i in range(_SIZE)), strict=False)
            self._next.update(zip(grams, range(first, base_len), strict=False))
        for place in range(max(base_len, _SIZE), len(tokens)):
            token_id = tokens[place]
            self._next[tuple(tokens[place - _SIZE : place])] = place
            if self._expected is not None and tokens[self._expected] == token_id:
                self.length += 1
                self._expected += 1
            else:
                self.length = 0
                self._expected = self._next.get(tuple(tokens[place - _SIZE + 1 : place + 1]))
        self._read = len(tokens)
