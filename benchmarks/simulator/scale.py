"""The systems on a cluster that no machine here has, under bursts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.slo.systems import FIFO
from benchmarks.slo.targets import MULTIPLES, Target, targets_from
from benchmarks.slo.trace import CLASSES
from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.arrivals import Arrivals, Pattern, draw_trace
from treeserve_simulator.costs import MachineModel
from treeserve_simulator.report import Policies, report
from treeserve_simulator.simulation import simulate
from treeserve_simulator.systems import SYSTEMS, Cluster
from treeserve_simulator.trace import TraceRequest

_ALONE, _CROWD = 24, 200  # requests that tell what a machine does unloaded, and saturated


@dataclass(frozen=True)
class Scale:
    """How much to simulate.

    Attributes:
        load: mean rate of arrivals, as a multiple of what saturates the cluster without speculation. In bursts it is
            three times that.
    """

    verifiers: int
    requests: int
    load: float


def study(scale: Scale, model: MachineModel, say: Callable[[str], None]) -> dict[str, Any]:
    """What each system makes of the same bursts; targets and rates are set as `make bench-slo` sets them."""
    sample = draw_trace(Arrivals(_CROWD, 1.0), 1)
    policies, saturated_per_s = _promises(model, sample[:_ALONE]), _saturated_per_s(model, sample)
    rate = scale.load * scale.verifiers * saturated_per_s
    trace = draw_trace(Arrivals(scale.requests, rate, pattern=Pattern.BURSTS, period_s=10.0), 0)
    reports: dict[str, Mapping[str, Any]] = {}
    for name, system in SYSTEMS.items():
        outcome = simulate(trace, Cluster(model, scale.verifiers, policies), system)
        reports[name] = report(outcome, policies)
        violations = reports[name]["all"]["violations"]
        say(f"{name}: {violations} violations of {len(trace)}; {outcome.simulated_s:.0f} s in {outcome.cpu_s:.0f} s")
    return {
        **asdict(scale),
        "targets_ms": {c.name.lower(): {"ttft": p.ttft_ms, "tpot": p.tpot_ms} for c, p in policies.items()},
        "saturation_requests_per_s": saturated_per_s,
        "violations": {name: each["all"]["violations"] for name, each in reports.items()},
        "met_per_s": {name: each["all"]["met_per_s"] for name, each in reports.items()},
        "systems": reports,
    }


def _promises(model: MachineModel, requests: list[TraceRequest]) -> Policies:
    """The default policies with multiples of what lone requests take."""
    alone = [replace(request, at_s=60.0 * i) for i, request in enumerate(requests)]
    records = simulate(alone, Cluster(model), SYSTEMS[FIFO]).records
    medians = [
        statistics.median(value for record in records if (value := getattr(record, name)) is not None)
        for name in ("ttft_ms", "tpot_ms")
    ]
    targets = targets_from(Target(*medians), MULTIPLES)
    return {
        ServiceClass[name.upper()]: replace(
            DEFAULT_POLICIES[ServiceClass[name.upper()]], ttft_ms=targets[name].ttft_ms, tpot_ms=targets[name].tpot_ms
        )
        for name in CLASSES
    }


def _saturated_per_s(model: MachineModel, requests: list[TraceRequest]) -> float:
    """Requests that a verifier finishes a second while it has more than it can take."""
    at_once = [replace(request, at_s=0.0) for request in requests]
    return len(at_once) / simulate(at_once, Cluster(model), SYSTEMS[FIFO]).simulated_s
