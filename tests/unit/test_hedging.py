"""When a run counts as late: by its own pace, by what its verifier says to others, by the length of its prefill."""

from __future__ import annotations

from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from support.tickets import ticket

from treeserve_router.dispatcher import Dispatcher
from treeserve_router.hedging import Hedger, Run
from treeserve_router.metrics import RouterMetrics
from treeserve_router.queue import Ticket


class Places:
    """Stands for the dispatcher: room or none, and what it was told."""

    def __init__(self) -> None:
        self.has_room = True
        self.is_dead = True
        self.placed: list[tuple[Ticket, str]] = []
        self.suspected: list[Ticket] = []

    def place_now(self, ticket: Ticket, avoiding: str) -> bool:
        if self.has_room:
            self.placed.append((ticket, avoiding))
        return self.has_room

    def suspect(self, ticket: Ticket) -> bool:
        self.suspected.append(ticket)
        return self.is_dead


class Bench:
    def __init__(self, max_hedges: int = 2) -> None:
        self.now = 100.0
        self.places = Places()
        self.registry = CollectorRegistry()
        dispatcher, metrics = cast("Dispatcher", self.places), RouterMetrics(self.registry)
        self.hedger = Hedger(dispatcher, metrics, 1.0, max_hedges, lambda: self.now)

    def run(self, verifier_id: str = "a", prompt_tokens: int = 100) -> Run:
        run = Run(ticket(prompt_tokens=prompt_tokens))
        self.hedger.placed(run, verifier_id)
        return run

    def emit(self, *runs: Run, gap_s: float = 0.01, count: int = 20) -> None:
        for _ in range(count):
            self.now += gap_s
            for run in runs:
                self.hedger.heard(run, on_time=True)

    def patience_s(self, run: Run) -> float:
        return self.hedger.late_at(run) - self.now


async def test_a_run_that_waits_for_its_place_is_never_late() -> None:
    assert Bench().hedger.late_at(Run(ticket())) == float("inf")


async def test_fast_tokens_leave_the_floor() -> None:
    bench = Bench()
    run = bench.run()
    bench.emit(run)
    assert bench.patience_s(run) == pytest.approx(1.0)


async def test_slow_tokens_are_given_longer() -> None:
    bench = Bench()
    run = bench.run()
    bench.emit(run, gap_s=0.5)
    assert bench.patience_s(run) == pytest.approx(8 * 0.5)


async def test_a_prefill_is_given_longer_and_a_long_one_more() -> None:
    bench = Bench()
    assert bench.patience_s(bench.run(prompt_tokens=100)) == pytest.approx(1.2)
    assert bench.patience_s(bench.run(prompt_tokens=2000)) == pytest.approx(5.0)


async def test_the_pace_of_others_on_the_same_verifier_counts() -> None:
    bench = Bench()
    other, fresh, elsewhere = bench.run(), bench.run(), bench.run("b")
    bench.emit(other, gap_s=0.5)
    for run in (fresh, elsewhere):
        bench.hedger.heard(run, on_time=False)
    assert bench.patience_s(fresh) == pytest.approx(4.0)
    assert bench.patience_s(elsewhere) == pytest.approx(1.0)


async def test_one_that_starves_beside_others_is_given_longer_than_a_dead_verifier() -> None:
    bench = Bench()
    quiet, talking = bench.run(), bench.run()
    bench.emit(quiet, talking)
    began = bench.now
    bench.emit(talking, count=300)
    assert bench.hedger.late_at(quiet) - began == pytest.approx(3.0 + 1.0)
    bench.emit(talking, count=2000)
    assert bench.hedger.late_at(quiet) - began == pytest.approx(5.0)
    assert bench.hedger.hedge(quiet, ticket())
    assert not bench.places.suspected


async def test_tokens_that_nobody_was_waiting_for_say_nothing_of_the_pace() -> None:
    bench = Bench()
    run = bench.run()
    bench.emit(run)
    bench.now += 60.0  # its owner was busy with a slow client
    bench.hedger.heard(run, on_time=False)
    assert bench.patience_s(run) == pytest.approx(1.0)


async def test_a_stall_does_not_make_the_next_one_unnoticed() -> None:
    bench = Bench()
    run = bench.run()
    bench.emit(run)
    bench.now += 60.0
    bench.hedger.heard(run, on_time=True)
    assert bench.patience_s(run) < 2.0


async def test_a_stalled_verifier_is_suspected_and_avoided() -> None:
    bench = Bench()
    run, hedge = bench.run(), ticket()
    bench.now += 5.0
    assert bench.hedger.hedge(run, hedge)
    assert bench.places.suspected == [run.ticket]
    assert bench.places.placed == [(hedge, "a")]


async def test_one_that_shows_that_it_lives_is_given_longer() -> None:
    bench = Bench()
    bench.places.is_dead = False
    run = bench.run(prompt_tokens=0)
    bench.now += 2.0
    assert bench.hedger.late_at(run) < bench.now
    assert not bench.hedger.hedge(run, ticket())
    bench.now += 3.0
    assert bench.hedger.hedge(run, ticket())


async def test_hedges_are_bounded_and_settled_ones_make_room() -> None:
    bench = Bench(max_hedges=2)
    runs, hedges = [bench.run() for _ in range(3)], [ticket() for _ in range(3)]
    bench.now += 5.0
    assert [bench.hedger.hedge(run, hedge) for run, hedge in zip(runs, hedges, strict=True)] == [True, True, False]
    bench.hedger.settled(hedges[0], won=True)
    bench.hedger.settled(runs[0].ticket, won=False)  # no hedge
    assert bench.hedger.hedge(runs[2], hedges[2])
    outcomes = {
        outcome: bench.registry.get_sample_value("treeserve_router_hedges_total", {"outcome": outcome})
        for outcome in ("started", "won")
    }
    assert outcomes == {"started": 3, "won": 1}


async def test_without_room_nothing_is_counted() -> None:
    bench = Bench(max_hedges=1)
    run = bench.run()
    bench.now += 5.0
    bench.places.has_room = False
    assert not bench.hedger.hedge(run, ticket())
    bench.places.has_room = True
    assert bench.hedger.hedge(run, ticket())
