"""Trains a draft head on recorded answers; the target's features along them are computed as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from treeserve_engine.config import load_config
from treeserve_training.config import HEAD, TrainConfig
from treeserve_training.draft_vocabulary import DraftVocabulary, coverage, expected_counts
from treeserve_training.head_model import HeadBatch, HeadModel
from treeserve_training.packed_batch import PackedBatch, TrainingSequence
from treeserve_training.records import read_samples
from treeserve_training.ssm_training import Supervision
from treeserve_training.target_features import TargetFeatures
from treeserve_training.training_loop import Progress, Recipe, Training
from treeserve_training.training_set import ContextCut, TrainingSet, read_sequences


@dataclass(frozen=True)
class TrainedHead:
    """A head as its training left it."""

    model: HeadModel
    vocabulary: DraftVocabulary
    recipe: Recipe
    progress: Progress


class HeadTrainingSet(TrainingSet):
    """Batches with features. Each sequence begins where a drafter's window would."""

    def __init__(
        self,
        read: Callable[[], list[TrainingSequence]],
        features: TargetFeatures,
        *,
        sequences_per_step: int,
        hard_weight: float,
        seed: int,
    ) -> None:
        super().__init__(read, sequences_per_step=sequences_per_step, hard_weight=hard_weight, seed=seed)
        self._features = features

    def _batch(self, sequences: Sequence[TrainingSequence]) -> HeadBatch:
        parts = []
        for sequence in sequences:
            first = max(1, int(sequence.rows[0]) + 1 - self._features.shape.window_tokens)
            parts.append(self._features.along(sequence.token_ids[:-1].tolist(), first - 1))
        packed = PackedBatch.of(
            [_from_window(s, len(s.token_ids) - len(p)) for s, p in zip(sequences, parts, strict=True)],
            self._hard_weight,
        )
        return HeadBatch(**vars(packed), features=torch.from_numpy(np.concatenate(parts)))


def _from_window(sequence: TrainingSequence, first: int) -> TrainingSequence:
    """The sequence without the tokens before `first`."""
    kept = sequence.only(sequence.rows >= first)
    return replace(kept, token_ids=kept.token_ids[first:], rows=kept.rows - first)


def train_head(config: TrainConfig, model_folder: Path, data: Path, supervision: Supervision) -> TrainedHead | None:
    """Train a head from its last checkpoint on; None if the run was stopped before the end.

    Raises:
        InvalidArgumentError: if the target shows no hidden states, or is none that a head can be made of.
    """
    work = config.work_folder / HEAD
    work.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(config, model_folder, data, work, supervision.tell)
    whole = ContextCut((), config.max_context)

    def read() -> list[TrainingSequence]:
        return [s for s in read_sequences(data, "train", vocabulary, whole) if len(s.token_ids) > 2]

    features = TargetFeatures(model_folder, config.cache_dir, threads=config.threads, max_tokens=config.max_context + 1)
    total = config.sequences or round(config.epochs * len(read()))
    recipe = Recipe(total, config.learning_rate)
    model = HeadModel.from_target(model_folder, features.shape, vocabulary, seed=config.seed)
    batches = HeadTrainingSet(
        read,
        features,
        sequences_per_step=config.sequences_per_step,
        hard_weight=config.hard_weight,
        seed=config.seed,
    )
    training = Training(
        model,
        batches,
        recipe,
        work,
        on_step=lambda progress: supervision.on_step(HEAD, recipe, progress),
        stopping=supervision.stopping,
    )
    return TrainedHead(model, vocabulary, recipe, training.progress) if training.run() else None


def _vocabulary(
    config: TrainConfig, model_folder: Path, data: Path, work: Path, tell: Callable[[str], None]
) -> DraftVocabulary:
    """That of the first run, or the most frequent tokens."""
    vocab_size, remembered = load_config(model_folder).vocab_size, work / "vocabulary.npy"
    if remembered.exists():
        return DraftVocabulary(np.load(remembered), vocab_size)
    counts = expected_counts(read_samples(data, split="train"), vocab_size)
    vocabulary = DraftVocabulary.most_frequent(counts, config.vocabulary)
    tell(f"head's vocabulary: {len(vocabulary)} tokens, {coverage(counts, vocabulary):.1%} of outputs")
    np.save(remembered, vocabulary.token_ids)
    return vocabulary
