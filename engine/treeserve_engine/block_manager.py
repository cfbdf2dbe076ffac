"""Who owns which KV block: reserve before a step, then commit the accepted nodes or roll back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from treeserve_core.prefix import PrefixHash, extend_hashes
from treeserve_engine.kv_tiers import POOL, BlockCopy, KvTiers, Place
from treeserve_engine.prefix_cache import BlockPool

SlotArray = npt.NDArray[np.int64]


class OutOfBlocksError(RuntimeError):
    """Too few blocks are free."""


@dataclass(frozen=True)
class KvMoves:
    """KV rows to copy after a commit, slot by slot in this order; rows that stay where they are, are left out."""

    src: SlotArray
    dst: SlotArray


_NO_MOVES = KvMoves(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(eq=False)
class _Sequence:
    table: list[int]
    tenant: str | None  # None: its blocks are its own for ever
    computed_len: int = 0  # KV positions that are committed
    reserved: int | None = None  # KV positions beyond those, while a step runs
    tokens: list[int] = field(default_factory=list)  # of the committed positions, if it has a tenant
    names: list[PrefixHash] = field(default_factory=list)  # of its full blocks, likewise
    is_lost: bool = False  # a block of it could not be brought back


class BlockManager:
    """Hands out the blocks of a paged KV cache, and finds the prefixes that some of them hold already.

    A sequence added with its tokens shares: full blocks of committed KV get the names of their prefixes
    (`core.prefix`), sequences with the same prefix hold the same blocks, and what nobody holds stays reusable until
    its room is needed. Only whole blocks are shared; those that a step may write to, from the partly filled one on,
    are always the sequence's own. A sequence added without tokens neither shares nor finds anything.

    Safe to call from the engine's thread and the event loop at once.

    Args:
        clock: seconds, monotonic; leases end by it.
        tiers: where evicted blocks go, and come back from; None forgets them.

    Raises:
        KeyError: by every method, for an unknown sequence.
        RuntimeError: for calls out of order, which are errors of the caller.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        tiers: KvTiers | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} slots are no cache")
        self.block_size = block_size
        self.total_blocks = num_blocks
        self._clock = clock
        self._tiers = tiers
        self._pool = BlockPool(num_blocks, clock, tiers)
        self._sequences: dict[int, _Sequence] = {}
        self._lock = threading.Lock()

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds, reusable ones included."""
        return self._pool.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Those of the free blocks that hold a prefix which can be reused."""
        return self._pool.reusable_blocks

    @property
    def tier_blocks(self) -> tuple[int, ...]:
        """Blocks in each tier below the pool."""
        return () if self._tiers is None else self._tiers.blocks

    @property
    def restored_blocks(self) -> int:
        """Blocks that came back from tiers so far."""
        return 0 if self._tiers is None else self._tiers.restored

    def blocks_to_take(self, names: Sequence[PrefixHash], num_tokens: int) -> int:
        """Free blocks that a sequence of so many tokens would take: blocks that others hold already count nothing.

        Args:
            names: `prefix_hashes` of the tokens, in blocks of this manager's size.
        """
        with self._lock:
            return self._blocks_for(num_tokens) - self._pool.shared(names[: self._whole_blocks(num_tokens - 1)])

    def add(
        self,
        seq_id: int,
        token_ids: Sequence[int] | None = None,
        tenant: str = "",
        *,
        names: Sequence[PrefixHash] = (),
        compute_last: int = 1,
        compute_ms: float = math.inf,
    ) -> int:
        """Begin a sequence, with the KV of the longest prefix that is known.

        Args:
            token_ids: its committed tokens; None for a sequence that shares nothing.
            tenant: whose they are: prefixes of others are not found.
            names: `prefix_hashes` of the tokens with this tenant, as far as the caller has them.
            compute_last: tokens at the end whose KV is computed in any case. At least 1: the last token's logits are
                what the sequence waits for.
            compute_ms: what computing a token takes. Blocks come back from tiers as far as that saves time.

        Returns:
            KV positions that are committed already: its `computed_len`, a multiple of the block size.
        """
        if compute_last < 1:
            raise ValueError("the last token is always computed")
        wanted: list[PrefixHash] = []
        if token_ids is not None:
            may_be_known = token_ids[: max(0, len(token_ids) - compute_last)]
            known = names[: self._whole_blocks(len(may_be_known))]
            wanted = extend_hashes(known, may_be_known, self.block_size, tenant)
        with self._lock:
            if seq_id in self._sequences:
                raise RuntimeError(f"sequence {seq_id} exists already")
            table = self._pool.reuse(wanted, compute_ms * self.block_size)
            sequence = _Sequence(table, None if token_ids is None else tenant, len(table) * self.block_size)
            if token_ids is not None:
                sequence.tokens = list(token_ids[: sequence.computed_len])
                sequence.names = wanted[: len(table)]
            self._sequences[seq_id] = sequence
            return sequence.computed_len

    def free(self, seq_id: int, lease_s: float = 0.0) -> None:
        """End a sequence and let its blocks go, a reservation's included.

        Its full blocks stay reusable until their room is needed.

        Args:
            lease_s: for so long other reusable blocks go first: a session keeps its KV between turns.
        """
        with self._lock:
            self._shrink(self._sequences.pop(seq_id), 0, self._clock() + lease_s if lease_s > 0 else 0.0)

    def forget(self, names: Sequence[PrefixHash]) -> None:
        """Let prefixes be found no more, here and in the tiers. Blocks that somebody holds stay as they are.

        Args:
            names: as for `blocks_to_take`.
        """
        with self._lock:
            for name in names:
                self._pool.forget(name)

    def shares(self, seq_id: int) -> bool:
        """Whether the sequence was added with its tokens: `commit` must be told what it commits."""
        return self._sequences[seq_id].tenant is not None

    def computed_len(self, seq_id: int) -> int:
        """Committed KV positions of a sequence."""
        return self._sequences[seq_id].computed_len

    def block_table(self, seq_id: int) -> list[int]:
        """Blocks of a sequence in the order of its KV positions."""
        return list(self._sequences[seq_id].table)

    def own_blocks(self, seq_id: int) -> int:
        """Blocks that nobody else holds: so many become free with the sequence."""
        with self._lock:
            return sum(1 for block in self._sequences[seq_id].table if self._pool.holders(block) == 1)

    def can_reserve(self, seq_id: int, n: int) -> bool:
        """Whether `reserve(seq_id, n)` would find enough free blocks."""
        return self._missing(self._sequences[seq_id], n) <= self._pool.free_blocks

    def reserve(self, seq_id: int, n: int) -> None:
        """Take blocks for `n` KV positions after the committed ones. `commit` or `rollback` ends the reservation.

        Raises:
            OutOfBlocksError: if too few are free; nothing has changed then.
        """
        with self._lock:
            sequence = self._sequences[seq_id]
            if sequence.reserved is not None:
                raise RuntimeError(f"sequence {seq_id} has a reservation already")
            if n < 1:
                raise ValueError(f"a reservation of {n} positions")
            missing = self._missing(sequence, n)
            if missing > self._pool.free_blocks:
                raise OutOfBlocksError(f"{missing} blocks are needed and {self._pool.free_blocks} are free")
            sequence.table += [self._pool.take() for _ in range(missing)]
            sequence.reserved = n

    def reserve_ahead(self, wanted: Mapping[int, int], needed: Mapping[int, int] | None = None) -> int | None:
        """Take blocks for steps in a row, and reserve all positions in them. Ended as what `reserve` does.

        Args:
            wanted: KV positions by seq_id, at least one each; those who come first come first where blocks are short.
            needed: how many of them a sequence must get, if that is more than one.

        Returns:
            How many blocks it took: for what each sequence needs, and beyond as far as none is under a lease. None if
            too few are free for that; nothing has changed then.
        """
        with self._lock:
            sequences = {self._sequences[seq_id]: n for seq_id, n in wanted.items()}
            if any(sequence.reserved is not None for sequence in sequences):
                raise RuntimeError("a sequence has a reservation already")
            needed = needed or {}
            least = {self._sequences[i]: self._missing(self._sequences[i], needed.get(i, 1)) for i in wanted}
            total = sum(least.values())
            if total > self._pool.free_blocks:
                return None
            spare = max(0, self._pool.unleased_blocks - total)
            taken = 0
            for sequence, n in sequences.items():
                more = min(self._missing(sequence, n) - least[sequence], spare)
                spare -= more
                taken += least[sequence] + more
                sequence.table += [self._pool.take() for _ in range(least[sequence] + more)]
                sequence.reserved = len(sequence.table) * self.block_size - sequence.computed_len
            return taken

    def commit(self, seq_id: int, kept_nodes: Sequence[int], token_ids: Sequence[int] = ()) -> KvMoves:
        """Keep some of the reserved nodes' KV: node kept_nodes[i] belongs to position computed_len + i from now on.

        Args:
            kept_nodes: node indices, ascending, each below the reserved count.
            token_ids: the tokens that this KV was computed from, one per kept node, if the sequence `shares`. Blocks
                that are full now can be found by them.

        Returns:
            The moves that put it there. Blocks that end up empty are free.
        """
        with self._lock:
            sequence = self._reserved(seq_id)
            moves = self._moves_to(sequence, kept_nodes)
            if sequence.tenant is not None and len(token_ids) != len(kept_nodes):
                raise ValueError(f"{len(token_ids)} tokens for {len(kept_nodes)} kept nodes of a sequence that shares")
            sequence.computed_len += len(kept_nodes)
            self._end_reservation(sequence)
            if sequence.tenant is not None:
                sequence.tokens += token_ids
                self._name_full_blocks(sequence, sequence.tenant)
            return moves

    def rollback(self, seq_id: int) -> None:
        """End a reservation and keep nothing of it."""
        with self._lock:
            self._end_reservation(self._reserved(seq_id))

    def take_copies(self) -> list[BlockCopy]:
        """Blocks to copy between the pool and its tiers, in this order, before anything else is written to the pool."""
        if self._tiers is None:
            return []
        with self._lock:
            return self._tiers.take_copies()

    def lose(self, place: Place) -> None:
        """Forget what should lie in a place: copying it there failed. Sequences that hold it can only be freed."""
        with self._lock:
            if place.tier != POOL and self._tiers is not None:
                self._tiers.lose(place)
                return
            self._pool.lose(place.slot)
            for sequence in self._sequences.values():
                sequence.is_lost |= place.slot in sequence.table[: self._whole_blocks(sequence.computed_len)]

    def is_lost(self, seq_id: int) -> bool:
        """Whether KV of the sequence was lost: it can only be freed."""
        return self._sequences[seq_id].is_lost

    def slots(self, seq_id: int, start: int, stop: int) -> SlotArray:
        """Slots of KV positions [start, stop), which are committed or reserved. int64[stop - start]."""
        sequence = self._sequences[seq_id]
        if sequence.is_lost:
            raise RuntimeError(f"KV of sequence {seq_id} was lost")
        end = sequence.computed_len + (sequence.reserved or 0)
        if not 0 <= start <= stop <= end:
            raise RuntimeError(f"positions [{start}, {stop}) of sequence {seq_id} are not within its {end}")
        table, size = sequence.table, self.block_size
        return np.array([table[p // size] * size + p % size for p in range(start, stop)], dtype=np.int64)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a block is lost, unknown, counted wrongly, or shared while it may be written.

        References are counted: a block that n sequences hold must have n of them.
        """
        with self._lock:
            for seq_id, sequence in self._sequences.items():
                expected = self._blocks_for(sequence.computed_len + (sequence.reserved or 0))
                if len(sequence.table) != expected or len(set(sequence.table)) != expected:
                    raise RuntimeError(f"sequence {seq_id} holds the blocks {sequence.table} instead of {expected}")
                writable = sequence.table[sequence.computed_len // self.block_size :]
                if any(self._pool.is_named(block) for block in writable):
                    raise RuntimeError(f"sequence {seq_id} may write to blocks that others may hold: {writable}")
            self._pool.check_integrity([sequence.table for sequence in self._sequences.values()])

    def _name_full_blocks(self, sequence: _Sequence, tenant: str) -> None:
        start = len(sequence.names)
        if self._whole_blocks(sequence.computed_len) == start:
            return
        sequence.names = extend_hashes(sequence.names, sequence.tokens, self.block_size, tenant)
        for i in range(start, len(sequence.names)):
            sequence.table[i] = self._pool.name(sequence.table[i], sequence.names[i])

    def _moves_to(self, sequence: _Sequence, kept_nodes: Sequence[int]) -> KvMoves:
        """What brings the kept nodes together. Raises ValueError if they do not ascend within the reserved ones."""
        reserved = sequence.reserved or 0
        if len(kept_nodes) <= reserved and tuple(kept_nodes) == tuple(range(len(kept_nodes))):
            return _NO_MOVES  # as in most steps
        kept = _checked(kept_nodes, reserved)
        moving = np.flatnonzero(kept != np.arange(len(kept)))
        return KvMoves(
            self._slots_of(sequence, sequence.computed_len + kept[moving]),
            self._slots_of(sequence, sequence.computed_len + moving),
        )

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _whole_blocks(self, positions: int) -> int:
        return positions // self.block_size

    def _missing(self, sequence: _Sequence, n: int) -> int:
        return self._blocks_for(sequence.computed_len + n) - len(sequence.table)

    def _reserved(self, seq_id: int) -> _Sequence:
        sequence = self._sequences[seq_id]
        if sequence.reserved is None:
            raise RuntimeError(f"sequence {seq_id} has no reservation")
        return sequence

    def _end_reservation(self, sequence: _Sequence) -> None:
        sequence.reserved = None
        self._shrink(sequence, self._blocks_for(sequence.computed_len))

    def _shrink(self, sequence: _Sequence, num_blocks: int, leased_until: float = 0.0) -> None:
        """Let the last blocks go, the very last one first: without it the others are still a prefix."""
        for block in reversed(sequence.table[num_blocks:]):
            self._pool.release(block, leased_until)
        del sequence.table[num_blocks:]

    def _slots_of(self, sequence: _Sequence, positions: SlotArray) -> SlotArray:
        table = np.asarray(sequence.table, dtype=np.int64)
        slots: SlotArray = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots


def _checked(kept_nodes: Sequence[int], reserved: int) -> SlotArray:
    kept = np.fromiter(kept_nodes, np.int64, len(kept_nodes))
    if len(kept) and not (kept[0] >= 0 and kept[-1] < reserved and (np.diff(kept) > 0).all()):
        raise ValueError(f"kept nodes {list(kept_nodes)} do not ascend within {reserved} reserved ones")
    return kept
