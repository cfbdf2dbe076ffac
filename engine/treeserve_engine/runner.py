"""A model with its paged KV cache: what a verifier or a drafter steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from treeserve_engine.batch import ForwardBatch, SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager, KvMoves
from treeserve_engine.interface import HiddenModel, Kv, Model
from treeserve_kernels.cpu.decoder import HiddenStates

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

    def forward_hidden(self, rows: Sequence[SequenceRows], layers: Sequence[int] = ()) -> list[HiddenStates]:
        """`forward` with hidden states, of a `HiddenModel`.

        Args:
            layers: after how many layers the `feature_rows` are wanted.

        Returns:
            For each sequence its part: logits and last hidden states of its `logits_rows`, features of its
            `feature_rows`.

        Raises: as `forward`.
        """
        model = self.model
        if not isinstance(model, HiddenModel):
            raise ValueError("the model shows no hidden states")
        batch = build_batch(rows, self.blocks)
        self._apply_moves()
        states = model.forward_hidden(batch, self._kv, layers)
        ends = zip(pairwise(batch.logits_offsets), pairwise(batch.feature_offsets), strict=True)
        return [HiddenStates(states.logits[a:b], states.last[a:b], states.features[c:d]) for (a, b), (c, d) in ends]

    def compute(
        self, rows: Sequence[SequenceRows], forward: Callable[[ForwardBatch, Kv], Logits]
    ) -> tuple[Logits, tuple[int, ...]]:
        """Compute rows by one of the model's forward passes: its logits, and where each sequence's begin and end.

        Raises: as `forward`.
        """
        batch = build_batch(rows, self.blocks)
        if batch.inputs is not None or len(batch.feature_rows):
            raise ValueError("inputs and features are for forward_hidden")
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
