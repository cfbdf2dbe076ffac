"""A model with its paged KV cache: what a verifier or a drafter steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from treeserve_engine.batch import ForwardBatch, SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager, KvMoves
from treeserve_engine.interface import HiddenModel, Kv, Model, RunModel
from treeserve_engine.kv_storage import TierBytes, TierStorage
from treeserve_engine.kv_tiers import BlockCopy, KvTiers, Place
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.decoder import HiddenStates

Logits = TypeVar("Logits")

_log = structlog.get_logger(__name__)


class ModelRunner:
    """Runs ragged batches and keeps their KV.

    For each step: `blocks.reserve` for every sequence, `forward` (several times when drafting level by level), then
    `commit` or `rollback` for every sequence.

    Args:
        tiers: where blocks go that the KV cache has no room for.
        clock: seconds, monotonic; leases of blocks end by it.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        *,
        tiers: TierBytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self._kv: Kv = model.new_kv(num_blocks, block_size)
        self._storage = None if tiers is None else TierStorage(self._kv, tiers)
        sizes = [] if self._storage is None else self._storage.measure()
        self.blocks = BlockManager(num_blocks, block_size, clock=clock, tiers=KvTiers(sizes) if sizes else None)
        self._moves: list[KvMoves] = []
        self._copies: deque[BlockCopy] = deque()
        self._lost: set[Place] = set()  # places that failed copies did not fill; copies from there may follow
        self._row_tokens: dict[int, Sequence[int]] = {}  # of sequences that share, by node

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
        batch = self._begin(rows)
        states = model.forward_hidden(batch, self._kv, layers)
        ends = zip(pairwise(batch.logits_offsets), pairwise(batch.feature_offsets), strict=True)
        return [HiddenStates(states.logits[a:b], states.last[a:b], states.features[c:d]) for (a, b), (c, d) in ends]

    def compute(
        self, rows: Sequence[SequenceRows], forward: Callable[[ForwardBatch, Kv], Logits]
    ) -> tuple[Logits, tuple[int, ...]]:
        """Compute rows by one of the model's forward passes: its logits, and where each sequence's begin and end.

        Raises: as `forward`.
        """
        if any(r.inputs is not None or len(r.feature_rows) for r in rows):
            raise ValueError("inputs and features are for forward_hidden")
        batch = self._begin(rows)
        return forward(batch, self._kv), batch.logits_offsets

    def decode(
        self,
        seq_ids: Sequence[int],
        sequences: Sequence[RunSequence],
        terms: RunTerms,
        choose: Choose,
    ) -> Ran:
        """Decode steps in a row, of a `RunModel`. It ends the sequences' reservations, and commits what was emitted.

        Args:
            sequences: one for each of `seq_ids`.
            choose: chooses tokens where logits and noise do not do.

        Raises:
            ValueError: if the model cannot, or the KV of a sequence was lost.
        """
        try:
            self._update_kv()
            if not isinstance(self.model, RunModel) or any(map(self.blocks.is_lost, seq_ids)):
                raise ValueError("no run: the model cannot, or KV was lost")
            tables = [self.blocks.block_table(seq_id) for seq_id in seq_ids]
            ran = self.model.decode(self._kv, tables, sequences, terms, choose)
        except BaseException:
            for seq_id in seq_ids:
                self.rollback(seq_id)
            raise
        for seq_id, sequence, each in zip(seq_ids, sequences, ran.sequences, strict=True):
            decoded = (sequence.root, *each.token_ids)[: len(each.token_ids)]
            computed = sequence.unread[: each.num_read] if sequence.unread else decoded
            self.blocks.commit(seq_id, range(len(computed)), computed)
        return ran

    def commit(self, seq_id: int, kept_nodes: Sequence[int]) -> None:
        """Keep the KV of these nodes of the step (ascending), moved together, and free the rest.

        The copies happen at the start of the next forward pass, those of all sequences at once. Until then nobody
        reads or writes KV, so a block that is freed and given away in between does no harm.
        """
        tokens = self._row_tokens.pop(seq_id, ())
        moves = self.blocks.commit(seq_id, kept_nodes, [tokens[node] for node in kept_nodes] if tokens else ())
        if len(moves.src):
            self._moves.append(moves)

    def rollback(self, seq_id: int) -> None:
        """Keep nothing of the step."""
        self._row_tokens.pop(seq_id, None)
        self.blocks.rollback(seq_id)

    def _begin(self, rows: Sequence[SequenceRows]) -> ForwardBatch:
        """Bring the KV cache up to date and lay the rows side by side."""
        self._update_kv()
        batch = build_batch(rows, self.blocks)
        for r in rows:
            if self.blocks.shares(r.seq_id):
                if r.inputs is not None:
                    raise ValueError(f"sequence {r.seq_id} shares its KV: it is of tokens, not of inputs")
                before = self._row_tokens.get(r.seq_id, ())[: r.node_offset]
                self._row_tokens[r.seq_id] = [*before, *r.token_ids]
        return batch

    def _update_kv(self) -> None:
        """Move and copy what was decided on."""
        self._apply_moves()
        self._copy_blocks()

    def _apply_moves(self) -> None:
        if not self._moves:
            return
        src = np.concatenate([moves.src for moves in self._moves])
        dst = np.concatenate([moves.dst for moves in self._moves])
        self._moves.clear()
        self._kv.move(src, dst)

    def _copy_blocks(self) -> None:
        """Evict and restore blocks, after the moves of what was committed and before anything new is written."""
        self._copies.extend(self.blocks.take_copies())
        while self._copies:
            self._copy_block(self._copies[0])
            self._copies.popleft()
            if not self._copies:
                self._copies.extend(self.blocks.take_copies())
        self._lost.clear()  # no copy that is decided from now on begins there

    def _copy_block(self, copy: BlockCopy) -> None:
        assert self._storage is not None  # who else decides on copies
        try:
            if copy.src in self._lost:
                raise OSError("its source was lost")
            self._storage.copy(copy)
            self._lost.discard(copy.dst)
        except OSError as error:
            _log.error("a KV block is lost", src=copy.src, dst=copy.dst, reason=str(error))
            self._lost.add(copy.dst)
            self.blocks.lose(copy.dst)
