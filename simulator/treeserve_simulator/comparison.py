"""A prediction beside what was measured: how far the latencies of the same requests are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeserve_simulator.percentiles import percentiles
from treeserve_simulator.record import Record
from treeserve_simulator.simulation import simulate
from treeserve_simulator.systems import Cluster, System
from treeserve_simulator.trace import TraceRequest

QUANTITIES = tuple((name, f"p{q}") for name in ("ttft_ms", "tpot_ms") for q in (50, 95))


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


def predict(measured: Sequence[Mapping[str, Any]], cluster: Cluster, system: System) -> list[Comparison]:
    """Simulate the requests of a recorded run and compare.

    Args:
        measured: lines of the run, in any order.

    Raises:
        InvalidArgumentError: if a line is no request.
        ValueError: if no request has a latency.
    """
    lines = sorted(measured, key=lambda line: float(line.get("at_s", 0.0)))
    trace = [TraceRequest.from_json(line) for line in lines]
    return compare(lines, simulate(trace, cluster, system).records)


def compare(measured: Sequence[Mapping[str, Any]], predicted: Sequence[Record]) -> list[Comparison]:
    """p50 and p95 of TTFT and TPOT, over the requests that have them on both sides.

    Args:
        measured: lines of a recorded run: a trace's with `ttft_ms` and `tpot_ms`, in the trace's order.
        predicted: the records of the same requests, in the same order.

    Raises:
        ValueError: if these are not the same requests, or none of them has a latency.
    """
    if len(measured) != len(predicted):
        raise ValueError(f"{len(measured)} requests were measured and {len(predicted)} predicted")
    comparisons = []
    for name, percentile in QUANTITIES:
        pairs = [
            (float(line[name]), value)
            for line, record in zip(measured, predicted, strict=True)
            if line.get(name) is not None and (value := getattr(record, name)) is not None
        ]
        if not pairs:
            raise ValueError(f"no request has a {name}")
        ours, theirs = (percentiles(pair[side] for pair in pairs)[percentile] for side in (0, 1))
        assert ours is not None and theirs is not None  # there are pairs
        comparisons.append(Comparison(f"{name} {percentile}", ours, theirs))
    return comparisons
