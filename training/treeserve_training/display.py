"""Shows a training run: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from treeserve_training import training_loop
from treeserve_training.learning_curve import CurvePoint

_LINE_EVERY_S = 30.0


class Display:
    """Progress of all drafters of a run."""

    def __init__(self, console: Console, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock_s = clock_s
        self._said_at = clock_s()
        self._outputs_then = 0
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} sequences, loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def tell(self, line: str) -> None:
        """Print a line above the bars."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_look(self, source: str, point: CurvePoint) -> None:
        """Say what was seen of the held-out split."""
        first, three = point.top_by_rank[0], sum(point.top_by_rank[:3])
        self.tell(
            f"{source}: after {point.sequences} sequences held-out loss {point.held_out_loss:.3f}; the target's choice "
            f"is its first {first:.1%}, among its first three {three:.1%}"
        )

    def on_step(self, source: str, recipe: training_loop.Recipe, progress: training_loop.Progress) -> None:
        """Show a step."""
        if self._console.is_terminal:
            if source not in self._tasks:
                self._tasks[source] = self._bars.add_task(source, total=recipe.sequences, loss=0.0)
            self._bars.update(self._tasks[source], completed=progress.sequences, loss=progress.loss)
        elif (elapsed := self._clock_s() - self._said_at) >= _LINE_EVERY_S:
            speed = (progress.outputs - self._outputs_then) / elapsed if self._outputs_then else 0.0
            phase = "" if progress.cooled_from is None else ", cooling down"
            self.tell(
                f"{source}: {progress.sequences}/{recipe.sequences} sequences, epoch {progress.position.epoch}, "
                f"loss {progress.loss:.4f}, {speed:.0f} output tokens/s{phase}"
            )
            self._said_at, self._outputs_then = self._clock_s(), progress.outputs
