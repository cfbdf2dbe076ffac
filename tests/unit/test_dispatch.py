"""Dispatching: who goes where and when, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.clock import Clock
from support.dispatching import BookedPool
from support.tickets import ticket

from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import ServiceClass
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.mailbox import Stranded
from treeserve_router.queue import RequestQueue, Ticket

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


class GivenOrder(RequestQueue):
    """A queue in whatever order the test wants."""

    order: Iterable[Ticket] = ()

    def in_order(self) -> Iterator[Ticket]:
        waiting = set(super().in_order())
        return iter([each for each in self.order if each in waiting])


class Bench:
    def __init__(self, count: int = 1, policies: Any = DEFAULT_POLICIES, **offer: Any) -> None:
        self.clock = Clock()
        self.pool = BookedPool(self.clock, count, **offer)
        self.queue = GivenOrder(10_000, 10**9, self.clock)
        self.dispatcher = Dispatcher(self.queue, self.pool, 10.0, self.clock, policies=policies)
        for verifier in self.pool.verifiers:
            verifier.report()

    def submit(self, *tickets: Ticket) -> None:
        """Queue tickets in this order, and dispatch."""
        self.queue.order = (*self.queue.order, *tickets)
        for each in tickets:
            self.dispatcher.submit(each)
        self.dispatcher.dispatch()

    def place_of(self, ticket: Ticket) -> str:
        """The verifier that was given it; empty for none."""
        return next((v.state.verifier_id for v in self.pool.verifiers if ticket in v.submitted), "")

    def fill(self, verifier: int, service_class: ServiceClass = REALTIME) -> None:
        """Take all places of a verifier."""
        chosen = self.pool.verifiers[verifier]
        for _ in range(chosen.state.max_sequences):
            mine = ticket(service_class)
            chosen.submit(mine)
            chosen.start(mine)


def test_a_dispatch_is_bounded_and_goes_on_as_first_tokens_come() -> None:
    bench = Bench(max_sequences=64)
    (verifier,) = bench.pool.verifiers
    tickets = [ticket(BATCH) for _ in range(40)]
    bench.submit(*tickets)
    assert list(verifier.submitted) == tickets[:16]
    verifier.start(*tickets[:3])
    bench.dispatcher.dispatch()
    assert list(verifier.submitted) == tickets[:19]


def test_a_ticket_that_waits_for_room_is_not_overtaken() -> None:
    bench = Bench()
    (verifier,) = bench.pool.verifiers
    verifier.report(free_blocks=20)
    running = ticket(STANDARD)
    bench.submit(running)
    verifier.start(running)
    long, short = ticket(STANDARD, 600), ticket(BATCH, 10)
    bench.submit(long, short)
    assert bench.place_of(short) == ""
    verifier.report(sequences=1, free_blocks=40)
    bench.dispatcher.dispatch()
    assert (bench.place_of(long), bench.place_of(short)) == ("a", "")


def test_a_different_verifier_that_fits_is_used() -> None:
    bench = Bench(2)
    bench.fill(0)
    mine = ticket(STANDARD, preferred_verifier="a", prefix_tokens={"a": 9})
    bench.submit(mine)
    assert bench.place_of(mine) == "b"


def test_nobody_waits_for_room_that_the_one_before_could_not_use() -> None:
    bench = Bench(2)
    large = bench.pool.verifiers[1].ledger
    large._offer = replace(large._offer, max_context_tokens=8192)
    large.avoid(False)  # its state is made anew
    bench.fill(1)
    long, short, behind = ticket(STANDARD, 5000), ticket(STANDARD, 10), ticket(STANDARD, 6000)
    bench.submit(long, short, behind)
    assert (bench.place_of(long), bench.place_of(short), bench.place_of(behind)) == ("", "a", "")


def test_urgent_ones_pass_only_into_what_is_kept_for_them() -> None:
    bench = Bench()  # four places, one kept for realtime
    (verifier,) = bench.pool.verifiers
    running = [ticket(STANDARD) for _ in range(3)]
    bench.submit(*running)
    verifier.start(*running)
    aged, interactive, realtime = ticket(BATCH), ticket(INTERACTIVE), ticket(REALTIME)
    bench.submit(aged, interactive, realtime)  # an order that ageing makes
    assert (bench.place_of(aged), bench.place_of(interactive), bench.place_of(realtime)) == ("", "", "a")
    verifier.start(realtime)
    verifier.end(running[0], running[1])
    verifier.report(sequences=2)
    bench.dispatcher.dispatch()
    assert (bench.place_of(aged), bench.place_of(interactive)) == ("a", "")


def test_an_urgent_ticket_exceeds_a_full_verifier_that_reports_something_to_pause() -> None:
    bench = Bench(2)
    for i in range(2):
        bench.fill(i, BATCH)
        bench.pool.verifiers[i].report(sequences=4)
    standard, urgent, next_urgent = ticket(STANDARD), ticket(REALTIME), ticket(REALTIME)
    bench.submit(urgent, next_urgent, standard)
    assert bench.place_of(urgent) == ""
    bench.pool.verifiers[1].report(sequences=4, preemptible=1)
    bench.dispatcher.dispatch()
    assert (bench.place_of(urgent), bench.place_of(next_urgent), bench.place_of(standard)) == ("b", "", "")


def test_what_was_waited_is_told() -> None:
    bench = Bench()
    bench.fill(0)
    mine = ticket()
    bench.submit(mine)
    bench.clock.now += 2.5
    bench.pool.verifiers[0].report(sequences=0)
    bench.pool.verifiers[0].end(*list(bench.pool.verifiers[0].submitted))
    bench.dispatcher.dispatch()
    assert bench.pool.verifiers[0].submitted[mine] == pytest.approx(2.5)


def test_the_stranded_are_given_up_on_after_a_while_and_hold_up_nobody() -> None:
    bench = Bench()
    stranded, behind = ticket(prompt_tokens=5000), ticket()
    bench.submit(stranded, behind)
    assert bench.place_of(behind) == "a"
    assert bench.dispatcher.dispatch() == pytest.approx(bench.clock.now + 10)
    bench.clock.now += 9.9
    bench.dispatcher.dispatch()
    assert stranded.mailbox.take_now() == []
    bench.clock.now += 0.2
    assert bench.dispatcher.dispatch() is None
    assert stranded.mailbox.take_now() == [Stranded()]


def test_a_verifier_that_comes_in_time_saves_the_stranded() -> None:
    bench = Bench(2)
    for verifier in bench.pool.verifiers:
        verifier.report(draining=True)
    mine = ticket()
    bench.submit(mine)
    bench.clock.now += 9
    bench.pool.verifiers[1].report()
    bench.dispatcher.dispatch()
    assert bench.place_of(mine) == "b"
    bench.clock.now += 9
    bench.dispatcher.dispatch()
    assert mine.mailbox.take_now() == []


def test_a_verifier_that_could_serve_is_waited_for_however_long_it_is_full() -> None:
    bench = Bench()
    (verifier,) = bench.pool.verifiers
    verifier.report(draining=True)
    mine = ticket()
    bench.submit(mine)
    bench.clock.now += 9
    verifier.report(sequences=4)
    assert bench.dispatcher.dispatch() is None
    bench.clock.now += 60
    bench.dispatcher.dispatch()
    assert mine.mailbox.take_now() == []
    verifier.report(sequences=2)
    bench.dispatcher.dispatch()
    assert bench.place_of(mine) == "a"


def test_withdrawing_works_at_every_stage() -> None:
    bench = Bench()
    bench.fill(0)
    waiting = ticket()
    bench.submit(waiting)
    bench.dispatcher.withdraw(waiting)
    (verifier,) = bench.pool.verifiers
    verifier.end(*list(verifier.submitted))
    verifier.report()
    bench.dispatcher.dispatch()
    assert bench.place_of(waiting) == ""
    running = ticket()
    bench.submit(running)
    for _ in range(2):
        bench.dispatcher.withdraw(running)
    assert verifier.cancelled == [running]


def test_a_second_run_goes_elsewhere_at_once_or_not_at_all() -> None:
    bench = Bench(2)
    waiting, second, third, urgent = ticket(), *(ticket(c, is_replay=True) for c in (STANDARD, STANDARD, REALTIME))
    bench.fill(0)
    bench.pool.verifiers[1].report(sequences=3)
    bench.submit(waiting)
    assert bench.place_of(waiting) == ""  # the last place is kept
    assert not bench.dispatcher.place_now(second, avoiding="a")
    bench.pool.verifiers[1].report(sequences=2)
    assert bench.dispatcher.place_now(second, avoiding="a")  # before what waits in the queue
    assert bench.place_of(second) == "b"
    assert not bench.dispatcher.place_now(third, avoiding="a")
    assert bench.dispatcher.place_now(urgent, avoiding="a")
    assert bench.place_of(urgent) == "b"
    assert not bench.dispatcher.place_now(ticket(REALTIME, is_replay=True), avoiding="a")
    bench.dispatcher.suspect(second)
    assert bench.pool.verifiers[1].state.holding_off


def test_a_second_run_needs_the_kv_blocks_of_its_prompt_and_output() -> None:
    bench = Bench(2)
    second = ticket(prompt_tokens=20, generated=(1,) * 13, is_replay=True)  # three blocks of 16, and one
    bench.pool.verifiers[1].report(sequences=1, free_blocks=3)
    assert not bench.dispatcher.place_now(second, avoiding="a")
    bench.pool.verifiers[1].report(sequences=1, free_blocks=4)
    assert bench.dispatcher.place_now(second, avoiding="a")
