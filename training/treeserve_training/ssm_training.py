"""Trains one SSM, or several by collective boost-tuning, with all that a stopped run needs to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import load_config
from treeserve_speculator.drafter_files import DrafterFolder
from treeserve_speculator.ssm_file import SsmFile
from treeserve_training.agreement import measure_agreement
from treeserve_training.boosting import left_over, shares
from treeserve_training.config import SSM, TrainConfig
from treeserve_training.draft_vocabulary import DraftVocabulary, coverage, expected_counts
from treeserve_training.learning_curve import CurvePoint, LearningCurve
from treeserve_training.packed_batch import TrainingSequence
from treeserve_training.records import read_samples
from treeserve_training.ssm_model import SsmModel
from treeserve_training.training_loop import Progress, Recipe, Training
from treeserve_training.training_set import ContextCut, TrainingSet, read_sequences

_LOOKS = 20
_LOOKED_AT = 60  # sequences


@dataclass(frozen=True)
class Supervision:
    """How a run is watched.

    Attributes:
        tell: told what happens, a line at a time.
        on_step: told of every step: which drafter, its recipe, how far it is.
        on_look: told of every look at the held-out split: which drafter, and what was seen.
        stopping: true once the run should end.
    """

    tell: Callable[[str], None]
    on_step: Callable[[str, Recipe, Progress], None]
    on_look: Callable[[str, CurvePoint], None]
    stopping: Callable[[], bool]


@dataclass(frozen=True)
class TrainedSsm:
    """A drafter as its training left it."""

    source: str
    model: SsmModel
    recipe: Recipe
    progress: Progress
    curve: list[CurvePoint]


class _Looks:
    """Looks at the held-out split some twenty times in a training."""

    def __init__(
        self, model: SsmModel, held_out: Sequence[TrainingSequence], recipe: Recipe, curve: LearningCurve
    ) -> None:
        self._model = model
        self._held_out = held_out[:_LOOKED_AT]
        self._every = max(1, recipe.sequences // _LOOKS)
        self._steps = 0
        self.curve = curve

    def after(self, progress: Progress) -> CurvePoint | None:
        """A point of the curve, if it is time for one."""
        before, self._steps = self._steps or progress.sequences, progress.sequences
        if progress.sequences // self._every == before // self._every or not self._held_out:
            return None
        agreement = measure_agreement(self._model, self._held_out, 0.0)
        point = CurvePoint(progress.sequences, progress.loss, agreement.loss, agreement.top_by_rank)
        self.curve.add(point)
        return point


class SsmTrainer:
    """Trains the SSMs of one configuration.

    Args:
        model_folder: of the target.
        data: the data folder.
        cut: what of a sequence is left out.
    """

    def __init__(
        self, config: TrainConfig, model_folder: Path, data: Path, cut: ContextCut, supervision: Supervision
    ) -> None:
        self._config = config
        self._model_folder = model_folder
        self._data = data
        self._cut = cut
        self._supervision = supervision
        # Boosted drafters are another experiment than one alone: the first of them has a smaller budget.
        self._work = config.work_folder / (SSM if config.ssms == 1 else f"boosted-{config.ssms}")
        self._work.mkdir(parents=True, exist_ok=True)
        self._start = None if config.start is None else self._start_file(config.start)
        self.vocabulary = self._choose_vocabulary()

    def run(self) -> list[TrainedSsm] | None:
        """All drafters, trained; None if the run was stopped before."""
        config, trained = self._config, list[TrainedSsm]()
        left: list[TrainingSequence] | None = None
        total = config.sequences or round(config.epochs * len(self.sequences("train")))
        for i, share in enumerate(shares(total, config.ssms)):
            source = SSM if i == 0 else f"{SSM}{i + 1}"
            if trained:
                left = left_over(self.sequences("train") if left is None else left, trained[-1].model)
                outputs = sum(len(sequence.rows) for sequence in left)
                self._supervision.tell(f"{source}: {outputs} output tokens that none of {len(trained)} gets right")
            first = trained[0].model if trained else None
            finished = self._train(source, Recipe(share, config.learning_rate), first, left)
            if finished is None:
                return None
            trained.append(finished)
        return trained

    def sequences(self, split: str) -> list[TrainingSequence]:
        """Those of a split that are there by now."""
        return read_sequences(self._data, split, self.vocabulary, self._cut)

    def _train(
        self, source: str, recipe: Recipe, first: SsmModel | None, left: list[TrainingSequence] | None
    ) -> TrainedSsm | None:
        """Train an SSM: the first one on all there is by now, a further one from the first on what is left."""
        config, watch = self._config, self._supervision
        model = self._untrained()
        if first is not None:
            model.load_state_dict(first.state_dict())

        def read() -> list[TrainingSequence]:
            return self.sequences("train") if left is None else left

        data = TrainingSet(
            read, sequences_per_step=config.sequences_per_step, hard_weight=config.hard_weight, seed=config.seed
        )
        folder = self._work / source
        looks = _Looks(model, self.sequences("validation"), recipe, LearningCurve(folder / "curve.jsonl"))

        def on_step(progress: Progress) -> None:
            watch.on_step(source, recipe, progress)
            if (point := looks.after(progress)) is not None:
                watch.on_look(source, point)

        training = Training(model, data, recipe, folder, on_step=on_step, stopping=watch.stopping)
        return TrainedSsm(source, model, recipe, training.progress, looks.curve.points()) if training.run() else None

    def _untrained(self) -> SsmModel:
        model = SsmModel.from_target(self._model_folder, self.vocabulary, self._config.layers)
        if self._start is not None:
            model.load_packed(self._start)
        return model

    def _start_file(self, folder: Path) -> SsmFile:
        held = DrafterFolder.read(folder)
        ssm = SsmFile.read(held.file(SSM, self._config.cache_dir), self._config.cache_dir)
        if len(ssm.layers) != self._config.layers:
            raise InvalidArgumentError("layers", f"{folder} has {len(ssm.layers)}, not {self._config.layers}")
        return ssm

    def _choose_vocabulary(self) -> DraftVocabulary:
        """The vocabulary of the drafter that is tuned further, or of the first run, or the most frequent tokens."""
        vocab_size, remembered = load_config(self._model_folder).vocab_size, self._work / "vocabulary.npy"
        if self._start is not None:
            return DraftVocabulary(self._start.token_ids, vocab_size)
        if remembered.exists():
            return DraftVocabulary(np.load(remembered), vocab_size)
        counts = expected_counts(read_samples(self._data, split="train"), vocab_size)
        vocabulary = DraftVocabulary.most_frequent(counts, self._config.vocabulary)
        self._supervision.tell(
            f"draft vocabulary: {len(vocabulary)} tokens, {coverage(counts, vocabulary):.1%} of outputs"
        )
        np.save(remembered, vocabulary.token_ids)
        return vocabulary
