"""The training loop: what is learnt, stopping and going on, cooling down, larger budgets, data that grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.training_data import rule_sample

from treeserve_training.agreement import measure_agreement
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.packed_batch import TrainingSequence
from treeserve_training.ssm_model import SsmModel
from treeserve_training.training_loop import Progress, Recipe, Training
from treeserve_training.training_set import Position, TrainingSet

VOCABULARY = DraftVocabulary(np.arange(280), 306)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sequences(count: int, seed: int = 0) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    return [TrainingSequence.of(rule_sample(rng, outputs=12), VOCABULARY) for _ in range(count)]


class Run:
    """Trains the tiny model; `stop_at` is the step after which it is stopped."""

    def __init__(
        self, target: Path, folder: Path, recipe: Recipe, *, samples: int = 40, stop_at: int | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = SsmModel.from_target(target, VOCABULARY, 1)
        self.steps: list[Progress] = []
        data = TrainingSet(lambda: _sequences(samples), sequences_per_step=4, hard_weight=0.0, seed=0)
        self.training = Training(
            self.model,
            data,
            recipe,
            folder,
            on_step=self.steps.append,
            stopping=lambda: stop_at is not None and self.training.progress.step >= stop_at,
            clock_s=lambda: 0.0,
        )
        self.finished = self.training.run()

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def test_a_rule_is_learnt(tiny_model: Path, tmp_path: Path) -> None:
    run = Run(tiny_model, tmp_path, Recipe(1600, learning_rate=1e-2, warmup_steps=20), samples=400)
    agreement = measure_agreement(run.model, _sequences(20, seed=1), 0.0)
    before = measure_agreement(SsmModel.from_target(tiny_model, VOCABULARY, 1), _sequences(20, seed=1), 0.0)
    assert run.finished and before.top_by_rank[0] < 0.1
    assert agreement.top_by_rank[0] > 0.7 and agreement.emitted_by_rank[0] > 0.7
    assert agreement.loss < 0.5 * before.loss and run.steps[-1].loss < run.steps[0].loss


@pytest.mark.parametrize("stop_at", [3, 10, 17])  # while the rate is constant, between epochs, while cooling down
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tiny_model: Path, tmp_path: Path, stop_at: int) -> None:
    recipe = Recipe(80, warmup_steps=5, cooldown=0.25)
    whole = Run(tiny_model, tmp_path / "whole", recipe)
    first = Run(tiny_model, tmp_path / "parts", recipe, stop_at=stop_at)
    assert whole.finished and not first.finished and first.training.progress.step == stop_at
    second = Run(tiny_model, tmp_path / "parts", recipe)
    assert second.finished and second.steps[0].step == stop_at + 1
    assert torch.equal(second.weights, whole.weights)
    assert second.training.progress == whole.training.progress
    again = Run(tiny_model, tmp_path / "parts", recipe)
    assert again.finished and again.steps == [] and torch.equal(again.weights, whole.weights)


def test_a_larger_budget_goes_on_from_before_the_cool_down(tiny_model: Path, tmp_path: Path) -> None:
    small, large = Recipe(40, warmup_steps=5), Recipe(80, warmup_steps=5)
    Run(tiny_model, tmp_path / "grown", small)
    grown = Run(tiny_model, tmp_path / "grown", large)
    whole = Run(tiny_model, tmp_path / "whole", large)
    assert grown.steps[0].sequences == 36  # 30 of 40 were to be at the constant rate, and 8 steps of 4 were
    assert torch.equal(grown.weights, whole.weights)


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    recipe = Recipe(1000, learning_rate=1.0, warmup_steps=4)
    assert [recipe.rate(step, 0, None) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert recipe.rate(100, 700, None) == 1.0
    assert [recipe.rate(100, at, 750) for at in (750, 875, 1000)] == [1.0, 0.5, 0.0]


def test_an_epoch_takes_every_sequence_once_and_new_ones_in_the_next() -> None:
    held = _sequences(10)
    data = TrainingSet(lambda: list(held), sequences_per_step=4, hard_weight=0.0, seed=3)
    batches = data.batches(Position())
    sizes, seen = [], []
    for _ in range(3):
        batch, position = next(batches)
        sizes.append(len(batch.lengths))
        seen += [tuple(part.tolist()) for part in torch.split(batch.token_ids, batch.lengths)]
    assert sizes == [4, 4, 2] and position == Position(1)
    assert sorted(seen) == sorted(tuple(s.token_ids.tolist()) for s in held)
    held += _sequences(6, seed=1)
    _, position = next(batches)
    assert position == Position(1, 16, 1)
    held += _sequences(6, seed=2)  # appear while an epoch runs: a run that goes on with it takes the same batches
    expected = [next(batches)[0].token_ids.tolist() for _ in range(3)]
    resumed = data.batches(position)
    assert [next(resumed)[0].token_ids.tolist() for _ in range(3)] == expected
