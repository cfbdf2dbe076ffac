"""A model with its paged KV cache: what a verifier or a drafter steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from treeserve_engine.batch import ForwardBatch, SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager, KvMoves
from treeserve_engine.interface import Kv, Model

Logits = TypeVar("Logits")


class ModelRunner:
    """Runs ragged batches and keeps their KV.

    For each step: `blocks.reserve` for every sequence, `forward` (several times when drafting level by level), then
    `commit` or `rollback` for every sequence.
    """

    def __init__(self, model: Model, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.blocks = BlockManager(num_blocks, block_size)
        self._kv: Kv = model.new_kv(num_blocks, block_size)
        self._pending: list[KvMoves] = []

    def forward(self, rows: Sequence[SequenceRows]) -> list[npt.NDArray[np.float32]]:
        """Compute rows whose KV positions are reserved.

        Returns:
            For each sequence the logits of its `logits_rows`, float32[k, vocab_size].

        Raises:
            ValueError: if the rows make no batch.
            RuntimeError: if a KV position is not reserved.
        """
        logits, offsets = self.compute(rows, self.model.forward)
        return [logits[start:stop] for start, stop in pairwise(offsets)]

    def compute(
        self, rows: Sequence[SequenceRows], forward: Callable[[ForwardBatch, Kv], Logits]
    ) -> tuple[Logits, tuple[int, ...]]:
        """Compute rows by one of the model's forward passes: its logits, and where each sequence's begin and end.

        Raises: as `forward`.
        """
        batch = build_batch(rows, self.blocks)
        self._apply_moves()
        return forward(batch, self._kv), batch.logits_offsets

    def commit(self, seq_id: int, kept_nodes: Sequence[int]) -> None:
        """Keep the KV of these nodes of the step (ascending), moved together, and free the rest.

        The copies happen at the start of the next forward pass, those of all sequences at once. Until then nobody
        reads or writes KV, so a block that is freed and given away in between does no harm.
        """
        moves = self.blocks.commit(seq_id, kept_nodes)
        if len(moves.src):
            self._pending.append(moves)

    def rollback(self, seq_id: int) -> None:
        """Keep nothing of the step."""
        self.blocks.rollback(seq_id)

    def _apply_moves(self) -> None:
        if not self._pending:
            return
        src = np.concatenate([moves.src for moves in self._pending])
        dst = np.concatenate([moves.dst for moves in self._pending])
        self._pending.clear()
        self._kv.move(src, dst)
