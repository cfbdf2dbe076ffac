"""How a training came along: points in a file beside its checkpoints, so that a resumed run goes on with the curve."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class CurvePoint:
    """One look at a drafter in training.

    Attributes:
        sequences: trained on so far.
        loss: mean per output token over the latest steps.
        held_out_loss: mean per output token of the held-out split.
        top_by_rank: share of held-out rows where the drafter's r-th token is the target's most probable.
    """

    sequences: int
    loss: float
    held_out_loss: float
    top_by_rank: tuple[float, ...]


class LearningCurve:
    """The points of one training."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, point: CurvePoint) -> None:
        """Append a point."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(point)) + "\n")

    def points(self) -> list[CurvePoint]:
        """All points in order; of what was trained twice, after a crash or with a larger budget, the later."""
        if not self._path.exists():
            return []
        raw = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        latest: list[CurvePoint] = []
        for entry in raw:
            point = CurvePoint(**{**entry, "top_by_rank": tuple(entry["top_by_rank"])})
            latest = [earlier for earlier in latest if earlier.sequences < point.sequences]
            latest.append(point)
        return latest
