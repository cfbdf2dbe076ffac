"""Sequences of a training step side by side, without padding, and what the target says should follow each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from treeserve_training.draft_vocabulary import OUTSIDE, DraftVocabulary
from treeserve_training.records import Sample

_TOP = 8


@dataclass(frozen=True)
class TrainingSequence:
    """One sample as a drafter sees it: its context, and at some of its rows what should follow.

    Attributes:
        token_ids: int32[T], the prompt and all outputs but the last, which nothing follows.
        rows: int32[K], ascending: the rows before the outputs that are trained on.
        top_ids: int32[K, 8] draft ids of what the target held most probable there, OUTSIDE where the draft vocabulary
            lacks it.
        top_log_probs: float16[K, 8], the target's.
        next_ids: int32[K] draft ids of the outputs, or OUTSIDE.
    """

    token_ids: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_log_probs: npt.NDArray[np.float16]
    next_ids: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls, sample: Sample, vocabulary: DraftVocabulary, *, cut_prefix: Sequence[int] = (), max_tokens: int = 1 << 30
    ) -> TrainingSequence:
        """A sample with every output trained on.

        Args:
            cut_prefix: left out of the context where a prompt begins with it.
            max_tokens: of the context; the beginning of a longer one is left out, too.
        """
        prompt = sample.prompt_ids
        if cut_prefix and tuple(prompt[: len(cut_prefix)]) == tuple(cut_prefix):
            prompt = prompt[len(cut_prefix) :]
        tokens = np.array([*prompt, *sample.output_ids], dtype=np.int32)
        first = max(len(tokens) - 1 - max_tokens, 0)
        rows = np.arange(max(len(prompt) - 1 - first, 0), len(tokens) - 1 - first, dtype=np.int32)
        outputs = slice(len(sample.output_ids) - len(rows), None)
        return cls(
            token_ids=tokens[first:-1],
            rows=rows,
            top_ids=vocabulary.draft_ids(sample.top_ids[outputs]),
            top_log_probs=sample.top_log_probs[outputs].copy(),  # not a view of its whole shard
            next_ids=vocabulary.draft_ids(np.asarray(sample.output_ids)[outputs]),
        )

    def only(self, chosen: npt.NDArray[np.bool_]) -> TrainingSequence:
        """The sequence trained on the chosen ones of its rows, bool[K]."""
        return TrainingSequence(
            self.token_ids,
            self.rows[chosen],
            self.top_ids[chosen],
            self.top_log_probs[chosen],
            self.next_ids[chosen],
        )


@dataclass(frozen=True)
class PackedBatch:
    """T rows of several sequences, K of them trained on, each with up to M likely successors.

    Attributes:
        token_ids: int64[T].
        positions: int64[T], from 0 in each sequence.
        lengths: rows of each sequence.
        rows: int64[K], rows that are trained on.
        target_ids: int64[K, M], draft ids.
        target_weights: float32[K, M], not negative; a row's sum is its weight in the loss.
        top_ids: int32[K, 8] and next_ids: int32[K]: see `TrainingSequence`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    rows: torch.Tensor
    target_ids: torch.Tensor
    target_weights: torch.Tensor
    top_ids: npt.NDArray[np.int32]
    next_ids: npt.NDArray[np.int32]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], hard_weight: float) -> PackedBatch:
        """Lay sequences side by side.

        Args:
            hard_weight: how much of the target distribution is the emitted token itself, in [0, 1].
        """
        lengths = tuple(len(s.token_ids) for s in sequences)
        firsts = np.cumsum([0, *lengths[:-1]])
        top_ids = np.concatenate([s.top_ids for s in sequences])
        next_ids = np.concatenate([s.next_ids for s in sequences])
        probabilities = np.exp(np.concatenate([s.top_log_probs for s in sequences]).astype(np.float32))
        ids, weights = _targets(top_ids, probabilities, next_ids, hard_weight)
        return cls(
            token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in sequences]).astype(np.int64)),
            positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            lengths=lengths,
            rows=torch.from_numpy(np.concatenate([s.rows + first for s, first in zip(sequences, firsts, strict=True)])),
            target_ids=torch.from_numpy(ids),
            target_weights=torch.from_numpy(weights),
            top_ids=top_ids,
            next_ids=next_ids,
        )


def _targets(
    top_ids: npt.NDArray[np.int32],
    probabilities: npt.NDArray[np.float32],
    next_ids: npt.NDArray[np.int32],
    hard_weight: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """What each row should say, [K, 9]: the target's top 8, and the emitted token.

    Of the target's distribution only the eight most probable tokens are on record. The rest is estimated by what was
    emitted: a token outside the eight counts fully. Where outputs were drawn from that distribution, the sum is, over
    many rows, the whole of it.
    """
    weights = np.zeros((len(top_ids), _TOP + 1), dtype=np.float32)
    weights[:, :_TOP] = probabilities * (1.0 - hard_weight)
    is_in_top = (top_ids == next_ids[:, None]).any(1) & (next_ids != OUTSIDE)
    weights[:, _TOP] = np.where(is_in_top, hard_weight, 1.0)
    ids = np.concatenate([top_ids, next_ids[:, None]], axis=1).astype(np.int64)
    weights[ids == OUTSIDE] = 0.0
    return np.where(ids == OUTSIDE, 0, ids), weights
