"""Fits a machine model to a few measured requests: what surrounds a forward pass, and how well texts are drafted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treeserve_simulator.costs import MachineModel
from treeserve_simulator.record import Record
from treeserve_simulator.simulation import simulate
from treeserve_simulator.systems import Cluster, System
from treeserve_simulator.trace import TraceRequest

_HALVINGS = 8
_ROWS_FACTORS = (0.5, 3.0)
_STEEPEST = 4.0  # the log-odds that a kind may be shifted by

Lines = Sequence[Mapping[str, Any]]


def fit_costs(cluster: Cluster, plain: System, alone: Lines, together: Lines) -> MachineModel:
    """The machine as it is while services run on it: requests without speculation take what they took.

    - Rows of a pass after the first cost so much more than on an engine that serves nobody that the times to the first
      token grow with the prompt as they did.
    - What a lone request's tokens take beyond their passes is around a step of one sequence. Which part of that comes
      anew with each further sequence (`sequence_ms`) shows where several run at a time; the rest is `step_ms`.
    - What is left of the times to the first token is `request_ms`.

    Args:
        plain: the system, without speculation.
        alone: lines of a recorded run of one request at a time.
        together: of one of a few at a time, each with the time at which it was sent.
    """
    machine = _with_overheads(cluster.machine, request_ms=0.0, step_ms=0.0, sequence_ms=0.0)
    cluster = replace(cluster, machine=machine)
    cluster = _with_rows_scaled(cluster, _rows_factor(cluster, plain, alone))
    around_ms = max(0.0, _median_gap(alone, _alone(cluster, plain, alone), "tpot_ms"))

    def shared(sequence_ms: float) -> Cluster:
        around = {"step_ms": around_ms - sequence_ms, "sequence_ms": sequence_ms}
        return replace(cluster, machine=_with_overheads(cluster.machine, **around))

    def excess(sequence_ms: float) -> float:
        return -_median_gap(together, _at_their_times(shared(sequence_ms), plain, together), "tpot_ms")

    fitted = shared(_root(excess, 0.0, around_ms))
    request_ms = max(0.0, _median_gap(alone, _alone(fitted, plain, alone), "ttft_ms"))
    return _with_overheads(fitted.machine, request_ms=request_ms)


def fit_kinds(cluster: Cluster, system: System, lines: Lines) -> MachineModel:
    """The machine with each kind of text shifted until lone requests with speculation take what they took per token.

    Args:
        lines: of a recorded run of one request at a time.
    """
    for name in sorted({str(line.get("kind", "")) for line in lines}):
        cluster = replace(cluster, machine=_fit_kind(cluster, system, name, lines))
    return cluster.machine


def _rows_factor(cluster: Cluster, plain: System, alone: Lines) -> float:
    """By how much rows are dearer than measured: requests with longer prompts then miss by no more than the others."""
    middle = statistics.median_low([int(line["prompt_tokens"]) for line in alone] or [0])
    short = [line for line in alone if int(line["prompt_tokens"]) <= middle]
    long = [line for line in alone if int(line["prompt_tokens"]) > middle]
    if not long:
        return 1.0

    def excess(factor: float) -> float:
        dearer = _with_rows_scaled(cluster, factor)
        gaps = (_median_gap(lines, _alone(dearer, plain, lines), "ttft_ms") for lines in (short, long))
        return next(gaps) - next(gaps)

    return _root(excess, *_ROWS_FACTORS)


def _fit_kind(cluster: Cluster, system: System, name: str, lines: Lines) -> MachineModel:
    machine, ours = cluster.machine, [line for line in lines if line.get("kind", "") == name]

    def shifted(log_odds: float) -> MachineModel:
        return replace(machine, kinds={**machine.kinds, name: machine.kind(name).shifted(log_odds)})

    def gap(log_odds: float) -> float:
        return _median_gap(ours, _alone(replace(cluster, machine=shifted(log_odds)), system, ours), "tpot_ms")

    return shifted(_root(gap, -_STEEPEST, _STEEPEST))


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses zero within bounds, by bisection."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def _alone(cluster: Cluster, system: System, lines: Lines) -> tuple[Record, ...]:
    """The same requests, each long after the one before."""
    trace = [replace(TraceRequest.from_json(line), at_s=60.0 * i, session="") for i, line in enumerate(lines)]
    return simulate(trace, cluster, system).records


def _at_their_times(cluster: Cluster, system: System, lines: Lines) -> tuple[Record, ...]:
    """The same requests, sent when they were; `lines` in the order of that."""
    return simulate([TraceRequest.from_json(line) for line in lines], cluster, system).records


def _median_gap(lines: Lines, predicted: Sequence[Record], name: str) -> float:
    """By how much requests took longer than predicted, at the median."""
    gaps = [
        float(line[name]) - value
        for line, record in zip(lines, predicted, strict=True)
        if line.get(name) is not None and (value := getattr(record, name)) is not None
    ]
    return statistics.median(gaps) if gaps else 0.0


def _with_rows_scaled(cluster: Cluster, factor: float) -> Cluster:
    costs = cluster.machine.costs.with_rows_scaled(factor)
    return replace(cluster, machine=replace(cluster.machine, costs=costs))


def _with_overheads(machine: MachineModel, **changes: float) -> MachineModel:
    return replace(machine, overheads=replace(machine.overheads, **changes))
