"""Who owns which KV block: reserve before a step, then commit the accepted nodes or roll back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.int64]


class OutOfBlocksError(RuntimeError):
    """Too few blocks are free."""


@dataclass(frozen=True)
class KvMoves:
    """KV rows to copy after a commit, slot by slot in this order; rows that stay where they are, are left out."""

    src: SlotArray
    dst: SlotArray


@dataclass
class _Sequence:
    table: list[int]
    computed_len: int = 0  # KV positions that are committed
    reserved: int | None = None  # KV positions beyond those, while a step runs


class BlockManager:
    """Hands out the blocks of a paged KV cache. A block belongs to one sequence or is free.

    Raises:
        KeyError: by every method, for an unknown sequence.
        RuntimeError: for calls out of order, which are errors of the caller.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} slots are no cache")
        self.block_size = block_size
        self.total_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def add(self, seq_id: int) -> None:
        """Begin a sequence without KV."""
        if seq_id in self._sequences:
            raise RuntimeError(f"sequence {seq_id} exists already")
        self._sequences[seq_id] = _Sequence([])

    def free(self, seq_id: int) -> None:
        """End a sequence and free its blocks, a reservation's included."""
        self._shrink(self._sequences.pop(seq_id), 0)

    def computed_len(self, seq_id: int) -> int:
        """Committed KV positions of a sequence."""
        return self._sequences[seq_id].computed_len

    def block_table(self, seq_id: int) -> list[int]:
        """Blocks of a sequence in the order of its KV positions."""
        return list(self._sequences[seq_id].table)

    def can_reserve(self, seq_id: int, n: int) -> bool:
        """Whether `reserve(seq_id, n)` would find enough free blocks."""
        return self._missing(self._sequences[seq_id], n) <= len(self._free)

    def reserve(self, seq_id: int, n: int) -> None:
        """Take blocks for `n` KV positions after the committed ones. `commit` or `rollback` ends the reservation.

        Raises:
            OutOfBlocksError: if too few are free; nothing has changed then.
        """
        sequence = self._sequences[seq_id]
        if sequence.reserved is not None:
            raise RuntimeError(f"sequence {seq_id} has a reservation already")
        if n < 1:
            raise ValueError(f"a reservation of {n} positions")
        missing = self._missing(sequence, n)
        if missing > len(self._free):
            raise OutOfBlocksError(f"{missing} blocks are needed and {len(self._free)} are free")
        sequence.table += [self._free.pop() for _ in range(missing)]
        sequence.reserved = n

    def commit(self, seq_id: int, kept_nodes: Sequence[int]) -> KvMoves:
        """Keep some of the reserved nodes' KV: node kept_nodes[i] belongs to position computed_len + i from now on.

        Args:
            kept_nodes: node indices, ascending, each below the reserved count.

        Returns:
            The moves that put it there. Blocks that end up empty are free.
        """
        sequence = self._reserved(seq_id)
        kept = np.fromiter(kept_nodes, np.int64, len(kept_nodes))
        if len(kept) and not (kept[0] >= 0 and kept[-1] < (sequence.reserved or 0) and (np.diff(kept) > 0).all()):
            raise ValueError(f"kept nodes {list(kept_nodes)} do not ascend within {sequence.reserved} reserved ones")
        moving = np.flatnonzero(kept != np.arange(len(kept)))
        moves = KvMoves(
            self._slots_of(sequence, sequence.computed_len + kept[moving]),
            self._slots_of(sequence, sequence.computed_len + moving),
        )
        sequence.computed_len += len(kept)
        self._end_reservation(sequence)
        return moves

    def rollback(self, seq_id: int) -> None:
        """End a reservation and keep nothing of it."""
        self._end_reservation(self._reserved(seq_id))

    def slots(self, seq_id: int, start: int, stop: int) -> SlotArray:
        """Slots of KV positions [start, stop), which are committed or reserved. int64[stop - start]."""
        sequence = self._sequences[seq_id]
        end = sequence.computed_len + (sequence.reserved or 0)
        if not 0 <= start <= stop <= end:
            raise RuntimeError(f"positions [{start}, {stop}) of sequence {seq_id} are not within its {end}")
        return self._slots_of(sequence, np.arange(start, stop))

    def check_integrity(self) -> None:
        """Raise RuntimeError if a block is lost, shared or unknown, or a table is too long or too short."""
        holders = Counter(self._free)
        for seq_id, sequence in self._sequences.items():
            holders.update(sequence.table)
            expected = self._blocks_for(sequence.computed_len + (sequence.reserved or 0))
            if len(sequence.table) != expected:
                raise RuntimeError(f"sequence {seq_id} holds {len(sequence.table)} blocks instead of {expected}")
        if holders != Counter(range(self.total_blocks)):
            wrong = {b: holders[b] for b in {*range(self.total_blocks), *holders} if holders[b] != 1}
            raise RuntimeError(f"blocks that are held more or less than once (block: holders): {wrong}")

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

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

    def _shrink(self, sequence: _Sequence, num_blocks: int) -> None:
        self._free += reversed(sequence.table[num_blocks:])
        del sequence.table[num_blocks:]

    def _slots_of(self, sequence: _Sequence, positions: SlotArray) -> SlotArray:
        table = np.asarray(sequence.table, dtype=np.int64)
        slots: SlotArray = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots
