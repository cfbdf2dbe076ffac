"""The load generator on a virtual clock, and the parts beside the load levels: urgent starts, starvation, tenants."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from support.fake_streams import FakeServer, arrival, record

from benchmarks.peers.peer import PeerError
from benchmarks.slo import starvation, tenants, urgent
from benchmarks.slo.calibration import calibrate, saturated_rate
from benchmarks.slo.load import Record, keep_busy, run_trace
from benchmarks.slo.steps import step_quantile_ms
from treeserve_client import ResourceExhausted, Unavailable
from treeserve_simulator.virtual_time import run_virtual

PROMPTS = {"chat": [(1, 2, 3)], "code": [(4, 5)]}
T = TypeVar("T")


# --- load generator


def test_requests_are_sent_when_due_whatever_became_of_those_before() -> None:
    server = FakeServer(gap_s=1.0)
    trace = [arrival(0.5, tokens=3), arrival(0.75, tokens=2)]
    records = run_virtual(run_trace(trace, server.submit, 10.0))
    assert [at_s for at_s, _ in server.came] == pytest.approx([0.5, 0.75])
    assert [r.outcome for r in records] == ["finished", "finished"]
    assert [r.tokens for r in records] == [3, 2]
    assert [r.ttft_ms for r in records] == pytest.approx([1000.0, 1000.0])
    assert [r.tpot_ms for r in records] == pytest.approx([1000.0, 1000.0])
    assert records[0].tokens_between(1.5, 3.5) == 2
    assert records[0].token_ids == (0, 1, 2)


def test_waiting_to_be_sent_counts_as_waiting_for_the_first_token() -> None:
    late = Record(arrival(at_s=1.0), "finished", ((3.0, 1), (3.5, 2)))
    assert late.ttft_ms == 2000.0 and late.tpot_ms == 250.0


def test_what_still_runs_at_the_end_is_cancelled_and_keeps_its_tokens() -> None:
    server = FakeServer(gap_s=1.0)
    (ran,) = run_virtual(run_trace([arrival(0.5, tokens=50)], server.submit, 4.0))
    assert (ran.outcome, ran.tokens) == ("unfinished", 3)
    assert server.streams[0].closed


@pytest.mark.parametrize(
    ("error", "outcome"), [(ResourceExhausted("full", 1.0), "shed"), (Unavailable("gone"), "failed")]
)
def test_refusals_and_failures_are_told_apart(error: Any, outcome: str) -> None:
    (ran,) = run_virtual(run_trace([arrival()], FakeServer(error=error).submit, 4.0))
    assert ran.outcome == outcome and ran.error
    assert ran.ttft_ms is None and ran.tpot_ms is None


def timed(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """What a coroutine returns, and how long it took."""

    async def both() -> tuple[T, float]:
        result = await work
        return result, asyncio.get_running_loop().time()

    return run_virtual(both())


def test_so_many_requests_are_kept_in_flight_until_the_end() -> None:
    server = FakeServer(gap_s=0.1)
    records, took_s = timed(keep_busy((arrival(tokens=10) for _ in itertools.count()), 3, server.submit, 0.0, 4.5))
    assert server.most_at_once == 3
    assert [r.outcome for r in records].count("finished") == 3 * 4
    assert [r.outcome for r in records].count("unfinished") == 3
    assert took_s == pytest.approx(4.5)
    assert sorted(round(r.arrival.at_s) for r in records) == [i for i in range(5) for _ in range(3)]


def test_a_closed_loop_does_not_hammer_at_who_refuses() -> None:
    server = FakeServer(error=ResourceExhausted("full"))
    run_virtual(keep_busy((arrival() for _ in itertools.count()), 2, server.submit, 0.0, 1.0))
    assert 10 <= len(server.came) <= 30


# --- calibration


def test_the_plain_system_is_measured_alone_and_full() -> None:
    server = FakeServer(gap_s=0.1)
    alone, crowd = [arrival(tokens=5)] * 3, [arrival(tokens=10)] * 40
    unloaded, rate = run_virtual(calibrate(alone, crowd, 4, server.submit))
    assert (unloaded.ttft_ms, unloaded.tpot_ms) == (pytest.approx(100), pytest.approx(100))
    assert rate == pytest.approx(4.0, rel=0.15)
    assert server.most_at_once == 4


def test_a_calibration_that_fails_says_so() -> None:
    with pytest.raises(PeerError, match="gone"):
        run_virtual(calibrate([arrival()], [arrival()], 1, FakeServer(error=Unavailable("gone")).submit))


def test_the_saturated_rate_leaves_out_filling_and_emptying() -> None:
    # Two at a time, each takes 1 s; the last one runs alone for much longer.
    times = [(0.0, 1.0), (0.0, 1.0), (1.0, 2.0), (1.0, 2.0), (2.0, 3.0), (2.0, 9.0)]
    records = [Record(arrival(at_s), "finished", ((end, 1),)) for at_s, end in times]
    assert saturated_rate(records) == 2.0
    with pytest.raises(PeerError, match="too few"):
        saturated_rate(records[:1])


# --- urgent start


def test_step_quantiles_are_those_between_two_scrapes() -> None:
    before = {0.01: 100.0, 0.02: 100.0, 0.04: 100.0, float("inf"): 100.0}
    after = {0.01: 100.0, 0.02: 150.0, 0.04: 200.0, float("inf"): 200.0}
    assert step_quantile_ms(before, after, 0.25) == pytest.approx(15.0)
    assert step_quantile_ms(before, after, 0.99) == pytest.approx(20 + 20 * 49 / 50)
    assert step_quantile_ms(after, after, 0.5) is None
    assert step_quantile_ms({}, {0.01: 0.0, float("inf"): 5.0}, 0.5) == pytest.approx(10.0)


def test_urgent_requests_meet_a_full_system_and_are_compared_with_an_idle_one() -> None:
    server = FakeServer(gap_s=0.05)
    rng = random.Random(0)
    buckets = iter([{0.1: 0.0, float("inf"): 0.0}, {0.1: 10.0, float("inf"): 10.0}])
    found = run_virtual(urgent.measure(5, PROMPTS, server.submit, lambda: next(buckets), rng))
    assert found["probes"] == 5
    assert found["excess_ms"]["p99"] == pytest.approx(0.0, abs=1e-6)
    assert found["within_one_step"] == 1.0
    assert server.most_at_once == urgent.FILLERS + 1
    assert found["fillers"]["refused"] == 0 and found["fillers"]["tokens"] > 1000
    classes = [a.service_class for _, a in server.came]
    assert classes.count("realtime") == 10 and {a.tenant for _, a in server.came} == {""}
    # Nobody fills the system while the probes are alone.
    assert classes[:5] == ["realtime"] * 5


def test_an_urgent_request_that_waits_longer_than_a_step_is_counted() -> None:
    alone = [record("realtime", ttft_s=0.05), record("realtime", ttft_s=0.02)]
    full = [record("realtime", ttft_s=0.06), record("realtime", ttft_s=0.40)]
    found = urgent.report(alone, full, {0.02: 0.0, float("inf"): 0.0}, {0.02: 100.0, float("inf"): 100.0})
    assert found["within_one_step"] == 0.5
    assert found["step_ms"]["p99"] == pytest.approx(19.8)
    assert found["bound_ms"] == pytest.approx(19.8 + found["own_ms"]["p99"])
    assert found["excess_ms"]["p50"] == pytest.approx((10 + 380) / 2)
    with pytest.raises(PeerError, match="shed"):
        urgent.report(alone, [Record(arrival(), "shed", error="full")] * 2, {}, {})


def test_probes_never_overlap_on_an_idle_system() -> None:
    probes = urgent.make_probes(20, PROMPTS, random.Random(0))
    assert min(b.at_s - a.at_s for a, b in itertools.pairwise(probes)) >= 0.4
    assert urgent.longest_s(20) > 2 * probes[-1].at_s


# --- starvation


def test_the_overload_has_more_urgent_work_than_fits_and_batch_work_beside() -> None:
    many = {kind: [(i,) for i in range(100)] for kind in PROMPTS}
    trace = starvation.make_overload(10.0, 60.0, many, random.Random(0))
    batch = [a for a in trace if a.service_class == "batch"]
    assert len(trace) - len(batch) == pytest.approx(starvation.URGENT_LOAD * 600, rel=0.15)
    assert len(batch) == pytest.approx(starvation.BATCH_LOAD * 600, rel=0.25)
    assert [a.at_s for a in trace] == sorted(a.at_s for a in trace)
    assert {a.tenant for a in trace} == {""}


def test_batch_work_that_stands_still_is_seen() -> None:
    going = [record("batch", at_s=1.0, ttft_s=1.0, tpot_s=1.0, tokens=28), record("realtime", tokens=12)]
    found = starvation.report(going, 30.0)
    assert found["tokens_per_window"] == [8, 10, 10]
    assert (found["empty_windows"], found["finished"], found["requests"]) == (0, 1, 1)
    assert found["longest_gap_s"] == pytest.approx(1.0)
    assert found["share_of_tokens"] == pytest.approx(28 / 40)
    waiting = Record(arrival(1.0, "batch"), "unfinished", ((2.0, 1), (29.0, 1)))
    starved = starvation.report([waiting], 30.0)
    assert starved["tokens_per_window"] == [1, 0, 1]
    assert (starved["empty_windows"], starved["finished"]) == (1, 0)
    assert starved["longest_gap_s"] == pytest.approx(27.0)


def test_a_window_without_batch_work_is_not_starved() -> None:
    done = record("batch", at_s=0.0, ttft_s=0.1, tokens=3)
    refused = Record(arrival(0.0, "batch"), "shed")
    assert starvation.report([done, refused], 30.0)["empty_windows"] == 0
    assert starvation.report([], 30.0)["longest_gap_s"] == 0.0


# --- tenants


def test_two_tenants_are_compared_by_what_they_were_served_once_both_wait() -> None:
    server = FakeServer(gap_s=0.05)
    found = run_virtual(tenants.measure(12.0, PROMPTS, server.submit, random.Random(0)))
    # This server has room for all, so the ten times as many requests get ten times as much.
    assert found["heavy_over_light"] == pytest.approx(10.0, rel=0.1)
    assert found["in_flight"] == {"light": 16, "heavy": 160}
    assert server.most_at_once == 176


def test_service_counts_prompts_and_output_after_the_first_seconds() -> None:
    early = Record(arrival(tenant="light", prompt=100), "finished", ((4.0, 1), (6.0, 3)))
    later = Record(arrival(tenant="heavy", prompt=100), "finished", ((6.0, 1), (7.0, 2)))
    found = tenants.report({"light": [early], "heavy": [later]}, 10.0)
    assert found["served_tokens"] == {"light": 3, "heavy": 103}
    assert tenants.report({"light": [], "heavy": [later]}, 10.0)["heavy_over_light"] is None
