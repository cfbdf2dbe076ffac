"""Prompt lookup: find where the last few tokens occurred before and copy what followed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings

# Estimated probability that the token after a match of 1, 2, ... tokens follows again. A rule of thumb: the verifier
# calibrates every source by what it really accepts; only the order against other sources' guesses matters here.
_MATCH_LOG_PROBS = tuple(map(math.log, (0.2, 0.4, 0.55, 0.7, 0.8, 0.85)))


class _NgramIndex:
    """Where each n-gram of a sequence ended last, kept up to date as the sequence grows."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._next_position: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def update(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that have a successor: all but the ones that end with the last token."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next_position[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)

    def longest_match(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Length of the longest suffix that occurred before and the position after its latest occurrence."""
        for size in reversed(self._sizes):
            if size <= len(tokens):
                position = self._next_position.get(tuple(tokens[-size:]))
                if position is not None:
                    return size, position
        return None


class NgramSource:
    """Proposes the chain that followed the latest occurrence of the longest matching suffix.

    Args:
        min_match, max_match: shortest and longest suffix looked up, tokens.
        max_length: longest chain.
    """

    name = "ngram"
    wants_top_tokens = False

    def __init__(self, min_match: int = 1, max_match: int = 4, max_length: int = 10) -> None:
        self._sizes = range(min_match, max_match + 1)
        self._max_length = max_length

    def open(self, state: DraftSequence) -> None:
        """Index the tokens so far."""
        index = state.source_state[self.name] = _NgramIndex(self._sizes)
        index.update(state.tokens)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Index the new tokens."""
        state.source_state[self.name].update(state.tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The chain after the latest match; a match that reaches the end of the sequence repeats itself."""
        index: _NgramIndex = state.source_state[self.name]
        match = index.longest_match(state.tokens)
        if match is None:
            return None
        size, position = match
        period = len(state.tokens) - position
        followed = state.tokens[position : position + self._max_length]
        length = min(budget, self._max_length)
        chain = followed[:length] if length <= period else [followed[i % period] for i in range(length)]
        # A right guess lengthens the match, so the estimate rises along the chain.
        log_probs = [_MATCH_LOG_PROBS[min(size + i, len(_MATCH_LOG_PROBS)) - 1] for i in range(length)]
        return TokenTree.sound((state.tokens[-1], *chain), tuple(range(-1, length)), (0.0, *log_probs))

    def close(self, state: DraftSequence) -> None:
        """Drop the index."""
        state.source_state.pop(self.name, None)


def build(settings: SourceSettings) -> NgramSource:
    """The source as configured."""
    return NgramSource()
