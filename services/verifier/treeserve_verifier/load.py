"""What this verifier can still take, and how fast it is at present."""

from __future__ import annotations

from dataclasses import dataclass, replace

_SMOOTHING = 0.1
_SIMILAR = 0.2
_UNTOLD_S = 1.0  # of work, and of drafting


@dataclass(frozen=True)
class Load:
    """What routers are told. A draining verifier takes nothing more.

    Attributes:
        sequences: held, whether they run or not.
        free_blocks: KV blocks that no sequence holds.
        speculators: attached.
        waiting: of the sequences, those that do not run yet or are paused.
        preemptible: running ones that a more urgent one may pause.
        step_ms: what a step takes, smoothed; 0 before the first.
        prefill_tokens_per_s: prompt tokens computed a second of the steps that compute any; 0 before the first.
        work_s, drafting_s: as `WorkMeter` has them.
    """

    sequences: int
    free_blocks: int
    speculators: int
    draining: bool
    waiting: int = 0
    preemptible: int = 0
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    work_s: float = 0.0
    drafting_s: float = 0.0

    def resembles(self, other: Load, few_blocks: int) -> bool:
        """Whether nothing changed but a few blocks, times by less than a fifth, and sums by less than a second."""
        times = (self.step_ms, other.step_ms), (self.prefill_tokens_per_s, other.prefill_tokens_per_s)
        sums = (self.work_s, other.work_s), (self.drafting_s, other.drafting_s)
        return (
            abs(self.free_blocks - other.free_blocks) <= few_blocks
            and all(abs(a - b) < _UNTOLD_S for a, b in sums)
            and all(abs(a - b) <= _SIMILAR * max(a, b) for a, b in times)
            and replace(
                self,
                free_blocks=other.free_blocks,
                step_ms=other.step_ms,
                prefill_tokens_per_s=other.prefill_tokens_per_s,
                work_s=other.work_s,
                drafting_s=other.drafting_s,
            )
            == other
        )


class SpeedMeter:
    """Smooths how long steps take and how fast prompts are computed.

    Attributes:
        step_ms: duration of a step; 0 before the first.
    """

    def __init__(self) -> None:
        self.step_ms = 0.0
        self._prefill_rows = 0.0  # of steps that have any
        self._prefill_ms = 0.0  # of the same steps

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second of the steps that compute any; 0 before the first."""
        return 1e3 * self._prefill_rows / self._prefill_ms if self._prefill_ms else 0.0

    def observe(self, prefill_rows: int, ms: float) -> None:
        """A step is done."""
        self.step_ms = _smoothed(self.step_ms, ms)
        if prefill_rows:
            self._prefill_rows = _smoothed(self._prefill_rows, prefill_rows)
            self._prefill_ms = _smoothed(self._prefill_ms, ms)


def _smoothed(value: float, new: float) -> float:
    return value + _SMOOTHING * (new - value) if value else new
