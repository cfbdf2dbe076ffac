"""Collective boost-tuning (SpecInfer, section 3): each further drafter is trained where all before it are wrong.

A sample is one output token with what precedes it, not a whole answer: a drafter of two layers is never right over a
whole answer, so that leaving out answers would leave out nothing. A drafter agrees on a sample if its most probable
token is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeserve_training.agreement import Ranking, agrees
from treeserve_training.packed_batch import TrainingSequence


def left_over(sequences: Sequence[TrainingSequence], tuned: Sequence[Ranking]) -> list[TrainingSequence]:
    """The sequences, each trained on only where every one of the drafters disagrees with the target.

    Sequences of which nothing is left are left out.
    """
    left = []
    for sequence in sequences:
        missed = np.ones(len(sequence.rows), dtype=np.bool_)
        for model in tuned:
            missed &= ~agrees(model, sequence)
        if missed.any():
            left.append(sequence.only(missed))
    return left


def shares(outputs: int, count: int) -> list[int]:
    """A budget of output tokens divided evenly between drafters: the sum is the budget."""
    return [outputs * (i + 1) // count - outputs * i // count for i in range(count)]
