"""Suffix decoding: follow what most often came after the present context, in this sequence and in finished ones.

After SuffixDecoding (Oliaro et al., 2024): a tree of substring counts per sequence and one per tenant over its finished
responses; speculation runs along child frequencies and stops below a path probability of 0.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.counts import Grown, grow
from treeserve_speculator.sources.suffix_trie import SuffixTrie
from treeserve_speculator.sources.tenants import TenantMemories


class _SequenceTrie:
    """The trie of one sequence and the nodes of its present suffixes, by length."""

    def __init__(self, depth: int, tokens: Sequence[int]) -> None:
        self._trie = SuffixTrie(depth)
        self.suffixes = [self._trie.root]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self.suffixes = self._trie.extend(self.suffixes, token_id)


class _Responses:
    """One tenant's finished responses (a `Memory`): counted, and kept to be forgotten.

    The responses bound its size as the trie does: one that comes again and again adds no node to it.
    """

    def __init__(self, depth: int) -> None:
        self.trie = SuffixTrie(depth)
        self._responses: deque[tuple[int, ...]] = deque()
        self._num_tokens = 0

    @property
    def size(self) -> int:
        return max(self.trie.size, self._num_tokens)

    def add(self, response: tuple[int, ...]) -> None:
        self.trie.add(response)
        self._responses.append(response)
        self._num_tokens += len(response)

    def forget_oldest(self) -> None:
        oldest = self._responses.popleft()
        self.trie.remove(oldest)
        self._num_tokens -= len(oldest)


class SuffixSource:
    """Grows the tree with the best expected acceptance among all lengths of the present context.

    Args:
        depth: longest substring counted: context and guess together.
        max_context: longest context looked up.
        max_counted_tokens: the end of a new sequence, or of a finished response, that is counted: more would keep
            the drafter's thread from the other sequences for too long.
        max_shared_nodes: bound of all tenants' tries, some 200 bytes each, and of the tokens they were counted from.
    """

    name = "suffix"
    wants_top_tokens = False

    def __init__(
        self, depth: int = 14, max_context: int = 8, max_counted_tokens: int = 2048, max_shared_nodes: int = 500_000
    ) -> None:
        self._depth = depth
        self._max_context = max_context
        self._max_counted_tokens = max_counted_tokens
        self._finished = TenantMemories(lambda: _Responses(depth), max_shared_nodes)

    def open(self, state: DraftSequence) -> None:
        """Count the end of what is known."""
        state.source_state[self.name] = _SequenceTrie(self._depth, state.tokens[-self._max_counted_tokens :])

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Count the new tokens."""
        state.source_state[self.name].extend(new_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The best tree over all context lengths in both tries; None where no context occurred before."""
        suffixes = state.source_state[self.name].suffixes
        finished = self._finished.find(state.tenant)
        best: Grown | None = None
        for length in range(1, min(self._max_context, len(state.tokens)) + 1):
            own = suffixes[length] if length < len(suffixes) else None
            shared = finished.trie.find(state.tokens[-length:]) if finished is not None else None
            for node in (own, shared):
                if node is not None and node.children:
                    grown = grow(node, length, state.tokens[-1], budget)
                    if best is None or grown.score >= best.score:
                        best = grown
        return None if best is None else best.tree()

    def close(self, state: DraftSequence) -> None:
        """Drop the sequence's trie and add its response to its tenant's."""
        if state.source_state.pop(self.name, None) is not None:
            start = max(state.prompt_len, len(state.tokens) - self._max_counted_tokens)
            if response := tuple(state.tokens[start:]):
                self._finished.add(state.tenant, response)


def build(settings: SourceSettings) -> SuffixSource:
    """The source as configured."""
    return SuffixSource()
