"""Token recycling: after a token, guess what the target itself held most probable when it last saw that token."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings

# Estimated probability of each rank. The rows are up to a whole conversation old, hence far from certain.
_RANK_LOG_PROBS = tuple(map(math.log, (0.45, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)))
_TOP = len(_RANK_LOG_PROBS)
_EMPTY = -1


class RecyclingSource:
    """One table of next tokens for all sequences of this process; trees grow best-first by rank.

    Args:
        vocab_size: rows of the table, made when the first top tokens arrive (32 bytes each).
        max_depth: deepest node; ranks say little far from the root.
    """

    name = "recycling"
    wants_top_tokens = True

    def __init__(self, vocab_size: int, max_depth: int = 6) -> None:
        self._vocab_size = vocab_size
        self._max_depth = max_depth
        self._table: npt.NDArray[np.int32] | None = None

    def open(self, state: DraftSequence) -> None:
        """Nothing to keep per sequence."""

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Remember the top tokens under the token that precedes each new one."""
        first = len(state.tokens) - len(new_tokens)
        for i, top in enumerate(top_tokens[: len(new_tokens)]):
            if first + i > 0 and top:
                self._remember(state.tokens[first + i - 1], top)

    def _remember(self, token_id: int, top: Sequence[int]) -> None:
        if self._table is None:
            self._table = np.full((self._vocab_size, _TOP), _EMPTY, dtype=np.int32)
        known = [t for t in dict.fromkeys(top) if t < self._vocab_size][:_TOP]
        self._table[token_id] = known + [_EMPTY] * (_TOP - len(known))

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The `budget` most probable nodes by the product of rank probabilities; None after an unknown token."""
        if self._table is None:
            return None
        token_ids, parents, log_probs = [state.tokens[-1]], [-1], [0.0]
        # (-path log-probability, parent, rank, depth, token); rank r + 1 enters when rank r leaves, so it stays small.
        heap: list[tuple[float, int, int, int, int]] = []
        self._push(heap, 0.0, 0, token_ids[0], 0, 1)
        while heap and len(token_ids) <= budget:
            cost, parent, rank, depth, token_id = heapq.heappop(heap)
            node = len(token_ids)
            token_ids.append(token_id)
            parents.append(parent)
            log_probs.append(_RANK_LOG_PROBS[rank])
            self._push(heap, cost + _RANK_LOG_PROBS[rank], parent, token_ids[parent], rank + 1, depth)
            if depth < self._max_depth:
                self._push(heap, cost, node, token_id, 0, depth + 1)
        return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs)) if len(token_ids) > 1 else None

    def _push(
        self,
        heap: list[tuple[float, int, int, int, int]],
        cost: float,
        parent: int,
        token_id: int,
        rank: int,
        depth: int,
    ) -> None:
        """Offer the `rank`-th child of a node that carries `token_id` and whose path costs `cost`."""
        if rank < _TOP and self._table is not None:
            child = int(self._table[token_id, rank])
            if child != _EMPTY:
                heapq.heappush(heap, (cost - _RANK_LOG_PROBS[rank], parent, rank, depth, child))

    def close(self, state: DraftSequence) -> None:
        """Nothing was kept per sequence."""


def build(settings: SourceSettings) -> RecyclingSource:
    """The source as configured."""
    return RecyclingSource(settings.vocab_size)
