"""What each class is promised: multiples of an unloaded system's latency, so that they mean the same everywhere."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.slo.load import Record
from benchmarks.slo.trace import CLASSES
from treeserve_client import ServiceClass


@dataclass(frozen=True)
class Target:
    """Longest time to the first token, and longest mean time of a token after it, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def is_met_by(self, record: Record) -> bool:
        """Whether a request ended well and in time. One token has no time per token after the first."""
        return (
            record.outcome == "finished"
            and record.ttft_ms is not None
            and record.ttft_ms <= self.ttft_ms
            and (record.tpot_ms is None or record.tpot_ms <= self.tpot_ms)
        )


@dataclass(frozen=True)
class Multiple:
    """How often the unloaded time to the first token, and per token, a class may take."""

    ttft: float
    tpot: float


MULTIPLES: Mapping[ServiceClass, Multiple] = {
    "realtime": Multiple(6, 4),
    "interactive": Multiple(12, 6),
    "standard": Multiple(30, 12),
    "batch": Multiple(100, 24),
}

Targets = Mapping[ServiceClass, Target]


def median_target(records: Sequence[Record]) -> Target:
    """What requests take, at the median, when each is alone.

    Raises:
        ValueError: if none of them ended with at least two tokens.
    """
    done = [r for r in records if r.outcome == "finished" and r.tpot_ms is not None]
    if not done:
        raise ValueError("no request of the unloaded system ended")
    return Target(
        statistics.median(r.ttft_ms for r in done if r.ttft_ms is not None),
        statistics.median(r.tpot_ms for r in done if r.tpot_ms is not None),
    )


def targets_from(unloaded: Target, multiples: Mapping[ServiceClass, Multiple]) -> Targets:
    """The targets of each class."""
    return {
        name: Target(unloaded.ttft_ms * multiples[name].ttft, unloaded.tpot_ms * multiples[name].tpot)
        for name in CLASSES
    }


def parse_multiple(text: str) -> tuple[ServiceClass, Multiple]:
    """A multiple of the command line, such as ``realtime=4:2.5``. Raises ValueError."""
    name, _, values = text.partition("=")
    ttft, _, tpot = values.partition(":")
    for known in CLASSES:
        if name == known:
            return known, Multiple(float(ttft), float(tpot))
    raise ValueError(f"{name!r} is no service class")
