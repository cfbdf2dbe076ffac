"""Suffix decoding: follow what most often came after the present context, in this sequence and in finished ones.

After SuffixDecoding (Oliaro et al., 2024): a tree of substring counts per sequence and a shared one over finished
responses; speculation runs along child frequencies and stops below a path probability of 0.1.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.suffix_trie import SuffixTrie, TrieNode

_MIN_PATH_PROBABILITY = 0.1


class _SequenceTrie:
    """The trie of one sequence and the nodes of its present suffixes, by length."""

    def __init__(self, depth: int, tokens: Sequence[int]) -> None:
        self._trie = SuffixTrie(depth)
        self.suffixes = [self._trie.root]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self.suffixes = self._trie.extend(self.suffixes, token_id)


class _FinishedResponses:
    """The shared trie, bounded by forgetting the oldest responses.

    The responses themselves are kept to be forgotten, and are bounded as the trie is: one that comes again and again
    adds no node to it.
    """

    def __init__(self, depth: int, max_size: int) -> None:
        self.trie = SuffixTrie(depth)
        self._max_size = max_size
        self._responses: deque[tuple[int, ...]] = deque()
        self.num_tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        response = tuple(tokens)
        self.trie.add(response)
        self._responses.append(response)
        self.num_tokens += len(response)
        while max(self.trie.size, self.num_tokens) > self._max_size:
            oldest = self._responses.popleft()
            self.trie.remove(oldest)
            self.num_tokens -= len(oldest)


class SuffixSource:
    """Grows the tree with the best expected acceptance among all lengths of the present context.

    Args:
        depth: longest substring counted: context and guess together.
        max_context: longest context looked up.
        max_counted_tokens: the end of a new sequence, or of a finished response, that is counted: more would keep
            the drafter's thread from the other sequences for too long.
        max_shared_nodes: bound of the shared trie, some 200 bytes each, and of the tokens that it was counted from.
    """

    name = "suffix"
    wants_top_tokens = False

    def __init__(
        self, depth: int = 14, max_context: int = 8, max_counted_tokens: int = 2048, max_shared_nodes: int = 500_000
    ) -> None:
        self._depth = depth
        self._max_context = max_context
        self._max_counted_tokens = max_counted_tokens
        self._finished = _FinishedResponses(depth, max_shared_nodes)

    def open(self, state: DraftSequence) -> None:
        """Count the end of what is known."""
        state.source_state[self.name] = _SequenceTrie(self._depth, state.tokens[-self._max_counted_tokens :])

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Count the new tokens."""
        state.source_state[self.name].extend(new_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The best tree over all context lengths in both tries; None where no context occurred before."""
        suffixes = state.source_state[self.name].suffixes
        best: tuple[float, TokenTree] | None = None
        for length in range(1, min(self._max_context, len(state.tokens)) + 1):
            own = suffixes[length] if length < len(suffixes) else None
            for node in (own, self._finished.trie.find(state.tokens[-length:])):
                if node is not None and node.children:
                    grown = _grow(node, length, state.tokens[-1], budget)
                    if best is None or grown[0] >= best[0]:
                        best = grown
        return best[1] if best is not None and len(best[1]) > 1 else None

    def close(self, state: DraftSequence) -> None:
        """Drop the sequence's trie and add its response to the shared one."""
        if state.source_state.pop(self.name, None) is not None:
            start = max(state.prompt_len, len(state.tokens) - self._max_counted_tokens)
            self._finished.add(state.tokens[start:])


def _grow(context: TrieNode, context_len: int, root_token: int, budget: int) -> tuple[float, TokenTree]:
    """Best-first tree below a context and its score: the sum of its nodes' path probabilities."""
    token_ids, parents, log_probs, score = [root_token], [-1], [0.0], 0.0
    # (-path probability, insertion order, parent, token, conditional probability, trie node, context length)
    heap: list[tuple[float, int, int, int, float, TrieNode, int]] = []
    order = 0
    node, at, path_probability, length = context, 0, 1.0, context_len
    while True:
        for token_id, probability, child in _followers(node, length, _MIN_PATH_PROBABILITY / path_probability):
            order += 1
            heapq.heappush(heap, (-path_probability * probability, order, at, token_id, probability, child, length + 1))
        if not heap or len(token_ids) > budget:
            break
        negative, _, parent, token_id, probability, node, length = heapq.heappop(heap)
        path_probability = -negative
        score += path_probability
        at = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        log_probs.append(math.log(probability))
    return score, TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))


def _followers(node: TrieNode, context_len: int, min_probability: float) -> list[tuple[int, float, TrieNode]]:
    """Children of at least `min_probability`, estimated from counts.

    Something new may follow too. As in Witten and Bell's estimate, it gets a share that grows with the number of
    distinct followers; the share shrinks with the length of the context, because long contexts predict better.
    """
    if not node.children:
        return []
    seen = sum(child.count for child in node.children.values())
    total = seen + len(node.children) / context_len
    least = min_probability * total
    return [(token, child.count / total, child) for token, child in node.children.items() if child.count >= least]


def build(settings: SourceSettings) -> SuffixSource:
    """The source as configured."""
    return SuffixSource()
