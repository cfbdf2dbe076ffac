"""A prediction beside what was measured: how far the latencies of the same requests are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError
from treeserve_simulator.percentiles import percentiles
from treeserve_simulator.record import Record
from treeserve_simulator.simulation import simulate
from treeserve_simulator.systems import Cluster, System
from treeserve_simulator.trace import TraceRequest, read_lines

LATENCIES = ("ttft_ms", "tpot_ms")
QUANTITIES = tuple((name, f"p{q}") for name in LATENCIES for q in (50, 95))


@dataclass(frozen=True)
class Comparison:
    """One percentile of one latency."""

    quantity: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0


def read_measured(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a recorded run, as `predict` takes them.

    Raises:
        InvalidArgumentError: naming the line, and its field, that is no request, or whose latency is no duration.
        OSError: if the file cannot be read.
    """
    return read_lines(path, _checked)


def predict(measured: Sequence[Mapping[str, Any]], cluster: Cluster, system: System) -> list[Comparison]:
    """Simulate the requests of a recorded run and compare.

    Args:
        measured: lines of the run, in any order.

    Raises:
        InvalidArgumentError: if a line is no request, or a latency no duration.
        ValueError: if no request has a latency, or one that is compared was measured as 0.
    """
    requests = [_request(line) for line in measured]
    requests.sort(key=lambda each: each[0].at_s)
    predicted = simulate([request for request, _ in requests], cluster, system).records
    return compare([latencies for _, latencies in requests], predicted)


def compare(measured: Sequence[Mapping[str, Any]], predicted: Sequence[Record]) -> list[Comparison]:
    """p50 and p95 of TTFT and TPOT, over the requests that have them on both sides.

    Args:
        measured: lines of a recorded run: a trace's with `ttft_ms` and `tpot_ms`, in the trace's order.
        predicted: the records of the same requests, in the same order.

    Raises:
        InvalidArgumentError: if a latency is no duration.
        ValueError: if these are not the same requests, none of them has a latency, or one was measured as 0.
    """
    if len(measured) != len(predicted):
        raise ValueError(f"{len(measured)} requests were measured and {len(predicted)} predicted")
    comparisons = []
    for name, percentile in QUANTITIES:
        pairs = [
            (ours, theirs)
            for line, record in zip(measured, predicted, strict=True)
            if (ours := _latency(line, name)) is not None and (theirs := getattr(record, name)) is not None
        ]
        if not pairs:
            raise ValueError(f"no request has a {name}")
        ours, theirs = (percentiles(pair[side] for pair in pairs)[percentile] for side in (0, 1))
        assert ours is not None and theirs is not None  # there are pairs
        if ours == 0.0:
            raise ValueError(f"{name} {percentile} was measured as 0: there is no relative error")
        comparisons.append(Comparison(f"{name} {percentile}", ours, theirs))
    return comparisons


def _request(line: Mapping[str, Any]) -> tuple[TraceRequest, dict[str, float | None]]:
    """A line's request, and what was measured of it."""
    return TraceRequest.from_json(line), {name: _latency(line, name) for name in LATENCIES}


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    _request(line)
    return line


def _latency(line: Mapping[str, Any], name: str) -> float | None:
    """Milliseconds; None if there are none. Raises InvalidArgumentError for what is no duration."""
    value = line.get(name)
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except (OverflowError, TypeError, ValueError):
        milliseconds = math.nan
    if not (math.isfinite(milliseconds) and milliseconds >= 0):
        raise InvalidArgumentError(name, "must be a number of milliseconds, not negative")
    return milliseconds
