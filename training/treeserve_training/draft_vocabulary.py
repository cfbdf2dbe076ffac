"""Which of the target's tokens a drafter can say: the most frequent ones of its training outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_training.records import Sample

OUTSIDE = -1


@dataclass(frozen=True)
class DraftVocabulary:
    """Draft ids are the indices of `token_ids`.

    Attributes:
        token_ids: int64[N], the target's ids, ascending: of two tokens the target prefers the lower id on a tie.
        vocab_size: of the target.
    """

    token_ids: npt.NDArray[np.int64]
    vocab_size: int
    _draft_ids: npt.NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        draft_ids = np.full(self.vocab_size, OUTSIDE, dtype=np.int32)
        draft_ids[self.token_ids] = np.arange(len(self.token_ids))
        object.__setattr__(self, "_draft_ids", draft_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def draft_ids(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Draft ids of the target's ids, OUTSIDE for those that are not in the vocabulary; int32 of the same shape."""
        ids: npt.NDArray[np.int32] = self._draft_ids[token_ids]
        return ids

    @classmethod
    def most_frequent(cls, counts: npt.NDArray[np.float64], size: int) -> DraftVocabulary:
        """The `size` most frequent ids (lower ids first among equals).

        Args:
            counts: float64[vocab_size], how often each id occurs.
        """
        order = np.lexsort((np.arange(len(counts)), -counts))
        return cls(np.sort(order[:size]).astype(np.int64), len(counts))


def expected_counts(samples: Iterable[Sample], vocab_size: int) -> npt.NDArray[np.float64]:
    """How often the target would say each id in the places of the samples' outputs: float64[vocab_size].

    The sum of its recorded probabilities. A token's rank is known sooner from these than from what was emitted.
    """
    counts = np.zeros(vocab_size)
    for sample in samples:
        np.add.at(counts, sample.top_ids, np.exp(sample.top_log_probs.astype(np.float32)))
    return counts


def coverage(counts: npt.NDArray[np.float64], vocabulary: DraftVocabulary) -> float:
    """The share of counted tokens that the vocabulary holds."""
    return float(counts[vocabulary.token_ids].sum() / max(counts.sum(), 1e-9))
