"""Simulated clusters: small ones beside a calculation by hand, queues beside a formula, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import structlog.testing
from support.simulated import cpu_machine, flat_machine, small_cluster

from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.arrivals import CONVERSATIONS, Arrivals, Pattern, draw_trace
from treeserve_simulator.report import report
from treeserve_simulator.simulation import Outcome, simulate
from treeserve_simulator.systems import SYSTEMS, Cluster
from treeserve_simulator.trace import TraceRequest

# A few times what the machine takes for a lone request.
TIGHT = {
    ServiceClass.REALTIME: replace(DEFAULT_POLICIES[ServiceClass.REALTIME], ttft_ms=300.0, tpot_ms=15.0),
    ServiceClass.INTERACTIVE: replace(DEFAULT_POLICIES[ServiceClass.INTERACTIVE], ttft_ms=600.0, tpot_ms=25.0),
    ServiceClass.STANDARD: replace(DEFAULT_POLICIES[ServiceClass.STANDARD], ttft_ms=2000.0, tpot_ms=50.0),
    ServiceClass.BATCH: DEFAULT_POLICIES[ServiceClass.BATCH],
}
FIFO, TREESERVE = SYSTEMS["fifo"], SYSTEMS["treeserve"]


def test_one_request_takes_its_steps_and_what_surrounds_them() -> None:
    machine = flat_machine(10.0, network_ms=1.0, request_ms=2.0, reply_ms=0.5, step_ms=3.0, sequence_ms=4.0)
    (record,) = simulate([TraceRequest(1.0, 4, 3)], small_cluster(machine), FIFO).records
    assert record.outcome == "finished"
    assert record.tokens == 3
    assert record.ttft_ms == pytest.approx(2.0 + 1.0 + (10.0 + 3.0 + 4.0) + 1.0 + 0.5)
    assert record.tpot_ms == pytest.approx(10.0 + 3.0 + 4.0)


def test_a_planned_step_costs_a_turn_and_those_that_run_on_from_it_do_not() -> None:
    machine = flat_machine(10.0, turn_ms=5.0)
    (record,) = simulate([TraceRequest(1.0, 4, 5)], small_cluster(machine, emit_interval_ms=40), FIFO).records
    assert record.ttft_ms == pytest.approx(10.0 + 5.0)
    assert record.tpot_ms == pytest.approx((4 * 10.0 + 5.0) / 4)


def test_a_request_that_comes_during_a_step_waits_for_its_end_and_joins_the_next() -> None:
    trace = [TraceRequest(0.0, 4, 3), TraceRequest(0.004, 4, 2)]
    first, second = simulate(trace, small_cluster(flat_machine(10.0)), FIFO).records
    assert (first.ttft_ms, first.tpot_ms) == (pytest.approx(10.0), pytest.approx(10.0))
    assert (second.ttft_ms, second.tpot_ms) == (pytest.approx(16.0), pytest.approx(10.0))


def test_a_verifier_with_one_place_serves_one_after_another() -> None:
    trace = [TraceRequest(0.0, 4, 3), TraceRequest(0.0, 4, 3)]
    cluster = small_cluster(flat_machine(10.0), max_sequences=1)
    assert [r.ttft_ms for r in simulate(trace, cluster, FIFO).records] == [pytest.approx(10.0), pytest.approx(40.0)]


def test_two_verifiers_share_the_requests() -> None:
    trace = [TraceRequest(0.0, 4, 3), TraceRequest(0.0, 4, 3)]
    cluster = small_cluster(flat_machine(10.0), verifiers=2, max_sequences=1)
    records = simulate(trace, cluster, FIFO).records
    assert [r.ttft_ms for r in records] == [pytest.approx(10.0), pytest.approx(10.0)]
    assert {r.verifier_id for r in records} == {"verifier-0", "verifier-1"}


@pytest.mark.parametrize("load", [0.7])
def test_waiting_is_that_of_the_formula_for_one_server_with_a_constant_service_time(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) service times (Pollaczek and Khinchine)."""
    rng = np.random.default_rng(4)
    times = np.cumsum(rng.exponential(0.010 / load, size=1500))
    trace = [TraceRequest(at_s, 4, 1) for at_s in times.tolist()]
    cluster = replace(small_cluster(flat_machine(10.0), max_sequences=1), router={"max_queued_requests": "100000"})
    waits_ms = [r.ttft_ms - 10.0 for r in simulate(trace, cluster, FIFO).records if r.ttft_ms is not None]
    assert len(waits_ms) == len(trace)
    assert np.mean(waits_ms) == pytest.approx(10.0 * load / (2 * (1 - load)), rel=0.15)


def test_a_request_that_no_verifier_can_take_fails_once_it_has_waited_for_one() -> None:
    trace = [TraceRequest(0.0, 300, 100), TraceRequest(0.0, 4, 3)]
    cluster = small_cluster(flat_machine(10.0), max_context_tokens=256)
    stranded, other = simulate(trace, replace(cluster, router={"verifier_wait_s": "2"}), FIFO).records
    assert (stranded.outcome, stranded.replays, stranded.ended_s) == ("failed", 0, pytest.approx(2.0))
    assert other.outcome == "finished"


def _run(name: str, trace: list[TraceRequest], cluster: Cluster) -> Outcome:
    return simulate(trace, cluster, SYSTEMS[name])


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_request_ends_once_and_nothing_is_left_although_kv_runs_out(name: str) -> None:
    trace = [TraceRequest(0.01 * i, 60, 120, list(ServiceClass)[i % 4], kind="rewrite") for i in range(24)]
    cluster = small_cluster(cpu_machine(), kv_tokens=512, max_context_tokens=256, max_sequences=16)
    lenient = dict.fromkeys(ServiceClass, QosPolicy(weight=1.0, preemptible=True))
    outcome = _run(name, trace, replace(cluster, policies=lenient))  # raises LeakError for what is left
    assert [record.request for record in outcome.records] == trace
    assert all(record.outcome == "finished" and record.tokens == 120 for record in outcome.records)
    assert outcome.preemptions > 0


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_equal_seeds_give_equal_results(name: str) -> None:
    trace = draw_trace(Arrivals(30, 6.0, pattern=Pattern.BURSTS, period_s=5.0), 3)
    cluster = small_cluster(cpu_machine(), verifiers=2)
    assert _run(name, trace, cluster).records == _run(name, trace, cluster).records


def test_logging_is_as_it_was_afterwards() -> None:
    with structlog.testing.capture_logs() as logs:
        simulate([TraceRequest(0.0, 4, 3)], small_cluster(flat_machine(10.0)), FIFO)
        structlog.get_logger().info("after")
    assert [entry["event"] for entry in logs][-1] == "after"


def test_another_seed_says_other_things() -> None:
    trace = draw_trace(Arrivals(5, 2.0), 3)
    cluster = small_cluster(cpu_machine())
    assert simulate(trace, cluster, TREESERVE, 0).records != simulate(trace, cluster, TREESERVE, 1).records


def test_speculation_shortens_what_can_be_foreseen() -> None:
    trace = [TraceRequest(2.0 * i, 40, 120, kind="rewrite") for i in range(8)]
    cluster = small_cluster(cpu_machine())

    def tpot_ms(name: str) -> float:
        return float(np.mean([r.tpot_ms for r in _run(name, trace, cluster).records if r.tpot_ms is not None]))

    assert tpot_ms("treeserve") < 0.85 * tpot_ms("fifo")


def test_a_second_turn_finds_the_first_ones_kv() -> None:
    trace = draw_trace(Arrivals(40, 0.2, CONVERSATIONS), 1)
    outcome = simulate(trace, small_cluster(cpu_machine(), verifiers=3), TREESERVE)
    first_turns = {r.request.session: r for r in reversed(outcome.records)}
    later = [r for r in outcome.records if r is not first_turns[r.request.session]]
    assert all(r.cached_tokens == 0 for r in first_turns.values())
    assert all(r.verifier_id == first_turns[r.request.session].verifier_id for r in later)
    computed = [r.request.prompt_tokens - r.cached_tokens for r in later]
    assert np.mean(computed) < 0.6 * np.mean([r.request.prompt_tokens for r in later])


def test_a_turn_waits_for_the_one_before_it() -> None:
    trace = [TraceRequest(0.0, 10, 50, session="s"), TraceRequest(0.001, 70, 5, session="s")]
    first, second = simulate(trace, small_cluster(flat_machine(10.0)), FIFO).records
    assert second.sent_s == pytest.approx(first.ended_s)


def test_treeserve_breaks_fewer_promises_than_either_baseline_when_bursts_come() -> None:
    trace = draw_trace(Arrivals(110, 6.0, pattern=Pattern.BURSTS, period_s=8.0), 1)
    cluster = replace(small_cluster(cpu_machine()), policies=TIGHT)
    violations = {name: report(_run(name, trace, cluster), cluster.policies)["all"]["violations"] for name in SYSTEMS}
    assert violations["treeserve"] < 0.8 * min(violations["fifo"], violations["fixed"])
