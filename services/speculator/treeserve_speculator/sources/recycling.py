"""Token recycling: after a token, guess what the target itself held most probable when it last saw that token."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.tenants import TenantMemories

# Estimated probability of each rank. The rows are up to a whole conversation old, hence far from certain.
_RANK_LOG_PROBS = tuple(map(math.log, (0.45, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)))
_TOP = len(_RANK_LOG_PROBS)


class _Told(NamedTuple):
    """Top tokens as they came. Those of a verifier in this process are found when they are first looked at."""

    token_ids: Sequence[int]


class _Table:
    """One tenant's next tokens (a `Memory`): for each token the row that was seen last, the oldest rows first."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[int, ...] | _Told] = {}

    @property
    def size(self) -> int:
        return len(self._rows)

    def add(self, item: tuple[int, _Told]) -> None:
        token_id, row = item
        self._rows.pop(token_id, None)
        self._rows[token_id] = row

    def forget_oldest(self) -> None:
        del self._rows[next(iter(self._rows))]

    def row(self, token_id: int) -> tuple[int, ...]:
        """What may follow a token, the most probable first."""
        row = self._rows.get(token_id, ())
        if isinstance(row, _Told):
            known = [t for t in dict.fromkeys(row.token_ids) if t < self._vocab_size]
            row = self._rows[token_id] = tuple(known[:_TOP])
        return row


class RecyclingSource:
    """A table of next tokens for all sequences of a tenant; trees grow best-first by rank.

    A sequence whose tenant is not known has a table of its own.

    Args:
        vocab_size: ids from here on are padding.
        max_depth: deepest node; ranks say little far from the root.
        max_shared_rows: bound of all tenants' tables, some 400 bytes a row.
    """

    name = "recycling"
    wants_top_tokens = True

    def __init__(self, vocab_size: int, max_depth: int = 6, max_shared_rows: int = 200_000) -> None:
        self._vocab_size = vocab_size
        self._max_depth = max_depth
        self._shared = TenantMemories(lambda: _Table(vocab_size), max_shared_rows)

    def open(self, state: DraftSequence) -> None:
        """Make a table if the sequence can use no other."""
        if not state.tenant:
            state.source_state[self.name] = _Table(self._vocab_size)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Remember the top tokens under the token that precedes each new one."""
        first = len(state.tokens) - len(new_tokens)
        for i, top in enumerate(top_tokens[: len(new_tokens)]):
            if first + i > 0 and top:
                self._remember(state, (state.tokens[first + i - 1], _Told(top)))

    def _remember(self, state: DraftSequence, row: tuple[int, _Told]) -> None:
        if state.tenant:
            self._shared.add(state.tenant, row)
        else:
            state.source_state[self.name].add(row)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The `budget` most probable nodes by the product of rank probabilities; None after an unknown token."""
        table = self._shared.find(state.tenant) if state.tenant else state.source_state[self.name]
        if table is None:
            return None
        token_ids, parents, log_probs, rows = [state.tokens[-1]], [-1], [0.0], [table.row(state.tokens[-1])]
        # (-path log-probability, parent, rank, depth); rank r + 1 enters when rank r leaves, so it stays small.
        heap: _Heap = []
        _push(heap, rows[0], 0.0, 0, 0, 1)
        while heap and len(token_ids) <= budget:
            cost, parent, rank, depth = heapq.heappop(heap)
            node, token_id = len(token_ids), rows[parent][rank]
            token_ids.append(token_id)
            parents.append(parent)
            log_probs.append(_RANK_LOG_PROBS[rank])
            _push(heap, rows[parent], cost + _RANK_LOG_PROBS[rank], parent, rank + 1, depth)
            rows.append(table.row(token_id) if depth < self._max_depth else ())
            _push(heap, rows[node], cost, node, 0, depth + 1)
        if len(token_ids) == 1:
            return None
        return TokenTree.sound(tuple(token_ids), tuple(parents), tuple(log_probs))

    def close(self, state: DraftSequence) -> None:
        """Drop the sequence's own table."""
        state.source_state.pop(self.name, None)


_Heap = list[tuple[float, int, int, int]]


def _push(heap: _Heap, row: Sequence[int], cost: float, parent: int, rank: int, depth: int) -> None:
    """Offer the `rank`-th child of a node whose row this is and whose path costs `cost`."""
    if rank < len(row):
        heapq.heappush(heap, (cost - _RANK_LOG_PROBS[rank], parent, rank, depth))


def build(settings: SourceSettings) -> RecyclingSource:
    """The source as configured."""
    return RecyclingSource(settings.vocab_size)
