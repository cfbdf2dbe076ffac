"""Finds where an output falls into repetition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

# A token counts as repeated if it lies within a run of this many tokens that occurred before in the output. Loops with
# a counter in them ("12. The book is ...") repeat such runs too, which a search for exact periods would miss.
_RUN = 6
_WINDOW = 64
_SHARE = 0.8


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where an output begins to repeat itself: the first token of the second copy. None if it does not loop.

    A loop is a window of 64 tokens of which 80 % are repeated. Code and lists repeat much less than that.
    """
    repeated = _repeated(tokens)
    counts = list(accumulate(repeated, initial=0))
    for start in range(len(tokens) - _WINDOW + 1):
        if counts[start + _WINDOW] - counts[start] >= _SHARE * _WINDOW:
            return repeated.index(True, start)
    return None


def _repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token whether it lies within a run that occurred before."""
    repeated = [False] * len(tokens)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - _RUN + 1):
        run = tuple(tokens[start : start + _RUN])
        if run in seen:
            repeated[start : start + _RUN] = [True] * _RUN
        seen.add(run)
    return repeated
