"""Wanted verifiers beside how many it takes to keep promises, and a loop that follows them, on simulated clusters."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from support.autoscaled import Look, ToyHpa, run_scaled, settled
from support.simulated import small_cluster

from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.arrivals import Arrivals, Traffic, draw_trace
from treeserve_simulator.costs import MachineModel, StepCosts
from treeserve_simulator.report import meets_targets
from treeserve_simulator.trace import TraceRequest

# Steps that are long enough for few of them to be a minute: 40 ms, and 4 ms more for each row.
MACHINE = MachineModel("a test", StepCosts((1, 64), (0,), ((40.0,), (292.0,)), (0.0, 0.0)))
MIX = (Traffic(ServiceClass.STANDARD, 0.8, 30, 30), Traffic(ServiceClass.BATCH, 0.2, 30, 40))
LENGTH_S = 100.0

# Requests a second, and the fewest verifiers that keep nine promises of ten.
LEAST = {1.0: 1, 2.0: 1, 3.0: 2, 6.0: 3}


def load(rate_per_s: float, length_s: float = LENGTH_S, begin_s: float = 0.0) -> list[TraceRequest]:
    trace = draw_trace(Arrivals(round(rate_per_s * length_s), rate_per_s, MIX), 1)
    return [replace(request, at_s=begin_s + request.at_s) for request in trace]


@cache
def outcome(rate_per_s: float, verifiers: int) -> tuple[float, float]:
    """The share of requests that got what they were promised, and the mean of the verifiers wanted."""
    records, looks = run_scaled(load(rate_per_s), small_cluster(MACHINE, verifiers))
    met = [meets_targets(record, DEFAULT_POLICIES) for record in records]
    return float(np.mean(met)), float(np.mean(list(settled(looks, 30.0, LENGTH_S))))


@pytest.mark.parametrize(("rate_per_s", "least"), LEAST.items())
def test_as_many_are_wanted_as_it_takes_to_keep_promises(rate_per_s: float, least: int) -> None:
    attained, wanted = outcome(rate_per_s, least)
    assert attained > 0.9
    assert math.ceil(wanted) == least
    if least > 1:
        assert outcome(rate_per_s, least - 1)[0] < 0.5


def test_more_load_wants_more_verifiers() -> None:
    wanted = [outcome(rate_per_s, least)[1] for rate_per_s, least in LEAST.items()]
    assert all(few < many for few, many in pairwise(wanted))
    assert wanted[-1] / wanted[1] == pytest.approx(3.0, rel=0.2)  # it grows as the load does


def test_the_number_of_verifiers_there_are_does_not_matter() -> None:
    wanted = [outcome(6.0, verifiers)[1] for verifiers in (2, 3, 5)]
    assert max(wanted) < 1.1 * min(wanted)


def turns(looks: list[Look]) -> int:
    """How often replicas went another way than the time before."""
    ways = [np.sign(after.verifiers - before.verifiers) for before, after in pairwise(looks)]
    ways = [way for way in ways if way]
    return sum(before != after for before, after in pairwise(ways))


def test_following_it_settles_and_follows_the_load_without_flapping() -> None:
    trace = load(6.0, 180.0) + load(1.5, 180.0, begin_s=180.0)
    records, looks = run_scaled(trace, small_cluster(MACHINE, 1), ToyHpa(window_s=60.0).decide)
    high = [look.verifiers for look in looks if 120.0 < look.at_s <= 180.0]
    assert set(high) == {3}
    assert looks[-1].verifiers == 1
    assert turns(looks) == 1  # up, and then down
    assert all(record.outcome in ("finished", "shed") for record in records)
    later = [record for record in records if record.request.at_s > 120.0]
    assert np.mean([meets_targets(record, DEFAULT_POLICIES) for record in later]) > 0.9
