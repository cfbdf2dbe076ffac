"""The training loop: steps until a budget is spent, checkpoints, a clean stop, and a cool-down at the end.

The learning rate rises for a few steps, then stays, and falls to zero only in the cool-down, which has a checkpoint
of its own. So a training goes on from where its constant rate ended when there is more data or a larger budget, as if
it had not been cooled ("warm-up, stable, decay": Hu et al., 2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from treeserve_training.packed_batch import PackedBatch
from treeserve_training.training_set import Position

_CHECKPOINT_EVERY_S = 60.0


class Trainable(Protocol):
    """What is trained: a torch module with a loss of its own."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All that the optimiser changes."""

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        """Sum over the rows of a batch that are trained on."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """From a checkpoint."""


class Batches(Protocol):
    """Where batches come from."""

    def batches(self, position: Position) -> Iterator[tuple[PackedBatch, Position]]:
        """Batches after a position, each with the position that follows it."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        sequences: to train on, those of later epochs counted again.
        learning_rate: after the warm-up.
        warmup_steps: over which it rises from zero.
        cooldown: share of `sequences` over which it falls to zero.
        clip: largest norm of a step's gradient.
    """

    sequences: int
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    cooldown: float = 0.25
    clip: float = 1.0
    weight_decay: float = 0.01

    def rate(self, step: int, sequences: int, cooled_from: int | None) -> float:
        """The learning rate of a step.

        Args:
            step: steps taken.
            sequences: trained on.
            cooled_from: where the cool-down began; None before it.
        """
        rate = self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)
        if cooled_from is None:
            return rate
        return rate * max(0.0, (self.sequences - sequences) / max(1, self.sequences - cooled_from))


@dataclass(frozen=True)
class Progress:
    """Where a training stands.

    Attributes:
        step: steps taken.
        sequences: trained on.
        outputs: output tokens trained on.
        position: in the data.
        cooled_from: `sequences` when the cool-down began; None before it.
        loss: mean per output token over the latest steps.
    """

    step: int = 0
    sequences: int = 0
    outputs: int = 0
    position: Position = field(default_factory=Position)
    cooled_from: int | None = None
    loss: float = 0.0


class Training:
    """One model's training in a folder that keeps its checkpoints.

    Args:
        on_step: told of every step.
        stopping: asked after every step; true ends the run with a checkpoint.
    """

    def __init__(
        self,
        model: Trainable,
        data: Batches,
        recipe: Recipe,
        folder: Path,
        *,
        on_step: Callable[[Progress], None],
        stopping: Callable[[], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._data = data
        self._recipe = recipe
        self._folder = folder
        self._on_step = on_step
        self._stopping = stopping
        self._clock_s = clock_s
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
        )
        self.progress = Progress()
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> bool:
        """Train from the last checkpoint until the budget is spent; whether it is, or the run was stopped before.

        A cool-down that an earlier run finished for a smaller budget is left aside; one that it began is gone on with.
        """
        constant, cooling = self._folder / "constant.pt", self._folder / "cooling.pt"
        budget = self._recipe.sequences
        begins = round(budget * (1.0 - self._recipe.cooldown))
        if not self._load(
            cooling, lambda p: p.cooled_from is not None and begins <= p.cooled_from <= p.sequences <= budget
        ):
            self._load(constant, lambda _: True)
            if not self._steps(until=begins, checkpoint=constant):
                return False
            self.progress = replace(self.progress, cooled_from=self.progress.sequences)
        return self._steps(until=budget, checkpoint=cooling)

    def _steps(self, until: int, checkpoint: Path) -> bool:
        saved_at = self._clock_s()
        if self.progress.sequences < until:
            for batch, position in self._data.batches(self.progress.position):
                self._step(batch, position)
                self._on_step(self.progress)
                if self.progress.sequences >= until:
                    break
                if self._stopping():
                    self._save(checkpoint)
                    return False
                if self._clock_s() - saved_at > _CHECKPOINT_EVERY_S:
                    self._save(checkpoint)
                    saved_at = self._clock_s()
        self._save(checkpoint)
        return True

    def _step(self, batch: PackedBatch, position: Position) -> None:
        now, rows = self.progress, len(batch.rows)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate(now.step, now.sequences, now.cooled_from)
        loss = self._model.loss(batch) / max(1, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        self.progress = replace(
            now,
            step=now.step + 1,
            sequences=now.sequences + len(batch.lengths),
            outputs=now.outputs + rows,
            position=position,
            loss=value if now.step == 0 else 0.98 * now.loss + 0.02 * value,
        )

    def _save(self, path: Path) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def _load(self, path: Path, is_wanted: Callable[[Progress], bool]) -> bool:
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        fields = dict(state["progress"])
        progress = Progress(**{**fields, "position": Position(**fields["position"])})
        if not is_wanted(progress):
            return False
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = progress
        return True
