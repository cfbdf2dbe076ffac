"""How often a drafter and the target agree on recorded outputs: by rank, with the loss. No trees, no quantisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from treeserve_training.packed_batch import PackedBatch, TrainingSequence

RANKS = 8
_SEQUENCES_PER_BATCH = 4


class Ranking(Protocol):
    """A drafter that gives logits for the rows of a batch."""

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """[K, N]."""


@dataclass(frozen=True)
class Agreement:
    """Over all rows.

    Attributes:
        loss: mean cross-entropy of a row, as in training.
        top_by_rank: share of rows where the drafter's r-th token is the target's most probable.
        emitted_by_rank: share of rows where it is the token that was emitted.
    """

    rows: int
    loss: float
    top_by_rank: tuple[float, ...]
    emitted_by_rank: tuple[float, ...]


def measure_agreement(model: Ranking, sequences: Sequence[TrainingSequence], hard_weight: float) -> Agreement:
    """Compare a drafter with the target on sequences."""
    rows, loss = 0, 0.0
    top, emitted = np.zeros(RANKS), np.zeros(RANKS)
    for batch in _batches(sequences, hard_weight):
        ranked, batch_loss = _ranked(model.logits(batch), batch)
        top += (ranked == batch.top_ids[:, :1]).sum(0)
        emitted += (ranked == batch.next_ids[:, None]).sum(0)
        rows, loss = rows + len(ranked), loss + batch_loss
    share = 1.0 / max(rows, 1)
    return Agreement(rows, loss * share, tuple((top * share).tolist()), tuple((emitted * share).tolist()))


def agrees(model: Ranking, sequence: TrainingSequence) -> npt.NDArray[np.bool_]:
    """Where the drafter's most probable token is the target's: bool[K]."""
    (batch,) = _batches([sequence], 0.0)
    best: npt.NDArray[np.int64] = model.logits(batch).argmax(1).numpy()
    agreeing: npt.NDArray[np.bool_] = best == sequence.top_ids[:, 0]
    return agreeing


def _batches(sequences: Sequence[TrainingSequence], hard_weight: float) -> Iterable[PackedBatch]:
    for start in range(0, len(sequences), _SEQUENCES_PER_BATCH):
        yield PackedBatch.of(sequences[start : start + _SEQUENCES_PER_BATCH], hard_weight)


def _ranked(logits: torch.Tensor, batch: PackedBatch) -> tuple[npt.NDArray[np.int64], float]:
    """Draft ids, best first, int64[K, RANKS]; and the loss summed over rows."""
    log_probs = torch.log_softmax(logits.float(), 1)
    loss = -(log_probs.gather(1, batch.target_ids) * batch.target_weights).sum().item()
    ranked: npt.NDArray[np.int64] = log_probs.topk(RANKS, 1).indices.numpy()
    return ranked, loss
