"""Collective boost-tuning (SpecInfer, section 3): each further drafter is trained where all before it are wrong.

A sample is one output token with what precedes it, not a whole answer: a drafter of two layers is never right over a
whole answer, so that leaving out answers would leave out nothing. A drafter agrees on a sample if its most probable
token is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

from treeserve_training.agreement import Ranking, agrees
from treeserve_training.packed_batch import TrainingSequence


def left_over(sequences: Sequence[TrainingSequence], tuned: Ranking) -> list[TrainingSequence]:
    """The sequences, each trained on only where a drafter disagrees with the target. Those without such a place go.

    What several leave over is what each leaves over of what those before it did.
    """
    missed = ((sequence, ~agrees(tuned, sequence)) for sequence in sequences)
    return [sequence.only(rows) for sequence, rows in missed if rows.any()]


def shares(outputs: int, count: int) -> list[int]:
    """A budget of output tokens divided evenly between drafters: the sum is the budget."""
    return [outputs * (i + 1) // count - outputs * i // count for i in range(count)]
