"""The samples of a data folder in the order in which a drafter is trained on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.packed_batch import PackedBatch, TrainingSequence
from treeserve_training.records import read_samples


@dataclass(frozen=True)
class ContextCut:
    """What a drafter does not get to see of a sequence.

    Attributes:
        prefix: left out where a prompt begins with it, such as a system message that all requests have in common.
        max_tokens: of a context; the beginning of a longer one is left out.
    """

    prefix: tuple[int, ...] = ()
    max_tokens: int = 1024


def read_sequences(folder: Path, split: str, vocabulary: DraftVocabulary, cut: ContextCut) -> list[TrainingSequence]:
    """All sequences of a split, as far as they are written by now."""
    return [
        TrainingSequence.of(sample, vocabulary, cut_prefix=cut.prefix, max_tokens=cut.max_tokens)
        for sample in read_samples(folder, split="train" if split == "train" else "validation")
        if sample.output_ids
    ]


@dataclass(frozen=True)
class Position:
    """How far training has come: the number of the epoch, the sequences in it, and the steps taken of it."""

    epoch: int = 0
    epoch_size: int = 0
    step: int = 0


class TrainingSet:
    """Endless batches, every sequence once an epoch, in an order that a seed decides.

    Args:
        read: reads the sequences; called again before each epoch, so that one trains on what has been added meanwhile.
            What was there before must come first, in the same order.
    """

    def __init__(
        self, read: Callable[[], list[TrainingSequence]], *, sequences_per_step: int, hard_weight: float, seed: int
    ) -> None:
        self._read = read
        self._per_step = sequences_per_step
        self._hard_weight = hard_weight
        self._seed = seed

    def batches(self, position: Position) -> Iterator[tuple[PackedBatch, Position]]:
        """Batches after a position, each with the position that follows it."""
        while True:
            sequences = self._read()
            size = position.epoch_size if position.step else len(sequences)
            order = np.random.default_rng((self._seed, position.epoch)).permutation(size)
            steps = math.ceil(size / self._per_step)
            for step in range(position.step, steps):
                chosen = order[step * self._per_step : (step + 1) * self._per_step]
                following = Position(position.epoch, size, step + 1)
                if step + 1 == steps:
                    following = Position(position.epoch + 1)
                yield self._batch([sequences[i] for i in chosen]), following
            position = Position(position.epoch + 1)

    def _batch(self, sequences: Sequence[TrainingSequence]) -> PackedBatch:
        return PackedBatch.of(sequences, self._hard_weight)
