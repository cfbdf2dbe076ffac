"""Which requests are refused because their target for the first token cannot be met."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.clock import Clock
from support.dispatching import BookedPool
from support.tickets import ticket

from treeserve_core.errors import OverloadedError
from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.mailbox import SequenceEvent, Shed
from treeserve_router.queue import RequestQueue, Ticket

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


class Bench:
    """One verifier of four places that computes 1,000 prompt tokens a second."""

    def __init__(self, policies: Any = DEFAULT_POLICIES, **load: Any) -> None:
        self.clock = Clock()
        self.pool = BookedPool(self.clock)
        self.verifier = self.pool.verifiers[0]
        self.queue = RequestQueue(1000, 1_000_000, self.clock)
        self.dispatcher = Dispatcher(self.queue, self.pool, 10.0, self.clock, policies=policies)
        self.verifier.report(**({"step_s": 0.01, "prefill_tokens_per_s": 1000} | load))

    def submit(self, *args: Any, **fields: Any) -> Ticket:
        mine = ticket(*args, **fields)
        self.dispatcher.submit(mine)
        self.dispatcher.dispatch()
        return mine

    def pass_time(self, seconds: float, ended: Ticket | None = None) -> None:
        self.clock.now += seconds
        if ended is not None:
            self.verifier.end(ended)
            self.verifier.report(sequences=len(self.running) - 1)
        self.dispatcher.dispatch()

    @property
    def running(self) -> list[Ticket]:
        return [each for each in self.verifier.submitted if each in self.verifier.ledger._sent]

    def fill(self) -> None:
        """All places taken by sequences that have started."""
        for _ in range(4):
            mine = self.submit(REALTIME)
            self.verifier.start(mine)
        assert len(self.running) == 4


def events(ticket: Ticket) -> list[SequenceEvent]:
    return ticket.mailbox.take_now()


def test_a_newcomer_behind_too_many_prompts_is_refused_and_told_when_to_come_back() -> None:
    bench = Bench()
    for _ in range(3):
        bench.submit(STANDARD, 1000)
    with pytest.raises(OverloadedError) as caught:  # 3 s of prompts before its own second, and a step
        bench.submit(STANDARD, 1000, ttft_ms=4500)
    assert caught.value.retry_after_s == pytest.approx(4.01 - 0.6 * 4.5)
    assert caught.value.cause == "slo"
    bench.submit(STANDARD, 1000, ttft_ms=6800)


def test_the_wait_for_a_place_counts() -> None:
    bench = Bench()
    bench.fill()
    waiting = [bench.submit(STANDARD, ttft_ms=60_000) for _ in range(60)]
    for _ in range(24):  # one every half second
        bench.pass_time(0.5, ended=bench.running[0])
        bench.verifier.start(bench.running[-1])
    left = sum(each not in bench.verifier.submitted for each in waiting)
    with pytest.raises(OverloadedError) as caught:
        bench.submit(STANDARD, ttft_ms=5000)
    assert caught.value.retry_after_s == pytest.approx(left * 0.5 - 3, rel=0.1)
    bench.submit(STANDARD, ttft_ms=1000 * left)


def test_a_tenant_waits_only_for_its_own_turn() -> None:
    bench = Bench()
    bench.fill()
    for _ in range(30):
        bench.submit(STANDARD, ttft_ms=60_000, tenant="many")
    for _ in range(12):
        bench.pass_time(0.5, ended=bench.running[0])
        bench.verifier.start(bench.running[-1])
    with pytest.raises(OverloadedError):
        bench.submit(STANDARD, ttft_ms=5000, tenant="many")
    bench.submit(STANDARD, ttft_ms=5000, tenant="few")


def test_a_waiting_ticket_is_refused_as_soon_as_nobody_can_start_it_in_time() -> None:
    bench = Bench()
    bench.fill()
    mine = bench.submit(STANDARD, 1000, ttft_ms=5000)
    bench.pass_time(3.9)  # 1.01 s of the target are left for a prompt of 1.01 s
    assert events(mine) == []
    assert bench.dispatcher.dispatch() == pytest.approx(100 + 5 - 1.01, abs=0.01)
    bench.pass_time(0.1)
    (shed,) = events(mine)
    assert isinstance(shed, Shed)
    assert shed.error.retry_after_s == pytest.approx(4.0 + 1.01 - 0.6 * 5, abs=0.01)
    assert len(bench.queue) == 0
    bench.pass_time(1.0, ended=bench.running[0])
    assert mine not in bench.verifier.submitted


def test_a_verifier_that_becomes_faster_gives_more_time() -> None:
    bench = Bench()
    bench.fill()
    mine = bench.submit(STANDARD, 1000, ttft_ms=5000)
    bench.verifier.report(sequences=4, step_s=0.01, prefill_tokens_per_s=2000)
    bench.pass_time(4.2)
    assert events(mine) == []
    bench.pass_time(0.3)
    assert len(events(mine)) == 1


def test_tickets_that_left_are_not_kept_until_their_targets_pass() -> None:
    bench = Bench()
    left = [weakref.ref(bench.submit(STANDARD, ttft_ms=1e9)) for _ in range(500)]
    for each in list(bench.queue.in_order()):
        bench.dispatcher.withdraw(each)
    for each in bench.running:
        bench.dispatcher.withdraw(each)
        bench.verifier.end(each)
    bench.verifier.submitted.clear()
    bench.verifier.cancelled.clear()
    bench.submit(STANDARD, ttft_ms=1e9)
    gc.collect()
    assert sum(one() is not None for one in left) < 100


@pytest.mark.parametrize(
    ("service_class", "fields"),
    [
        (REALTIME, {"ttft_ms": 500}),  # not sheddable
        (INTERACTIVE, {"ttft_ms": 500}),
        (STANDARD, {}),  # no target
        (BATCH, {}),
        (STANDARD, {"ttft_ms": 500, "is_replay": True}),
        (STANDARD, {"ttft_ms": 900, "prompt_tokens": 1000}),  # its prompt takes a second
    ],
)
def test_others_wait_however_long_it_takes(service_class: ServiceClass, fields: dict[str, Any]) -> None:
    bench = Bench()
    bench.fill()
    mine = bench.submit(service_class, **fields)
    bench.pass_time(100)
    assert events(mine) == []
    bench.pass_time(0, ended=bench.running[0])
    bench.pass_time(0, ended=bench.running[0])
    assert mine in bench.verifier.submitted


def test_nobody_is_refused_while_nothing_is_known() -> None:
    bench = Bench(step_s=0.0, prefill_tokens_per_s=0.0)
    bench.fill()
    mine = bench.submit(STANDARD, ttft_ms=10)
    bench.pass_time(100)
    assert events(mine) == []


def test_which_classes_may_be_refused_is_policy() -> None:
    bench = Bench({INTERACTIVE: QosPolicy(sheddable=True)})
    bench.fill()
    kept, refused = bench.submit(STANDARD, ttft_ms=500), bench.submit(INTERACTIVE, ttft_ms=500)
    bench.pass_time(1.0)
    assert (len(events(kept)), len(events(refused))) == (0, 1)


def test_what_was_slow_once_is_not_refused_for_ever() -> None:
    bench = Bench()
    for _ in range(40):  # under a load that is gone then
        late = bench.submit(BATCH, 10, ttft_ms=60_000)
        bench.clock.now += 20.0
        bench.verifier.start(late)
        bench.pass_time(0.01, ended=late)
    outcomes = []
    for _ in range(240):
        try:
            quick = bench.submit(BATCH, 10, ttft_ms=2000)
        except OverloadedError:
            outcomes.append("refused")
        else:
            outcomes.append("let in")
            bench.clock.now += 0.02
            bench.verifier.start(quick)
            bench.pass_time(0.01, ended=quick)
        bench.pass_time(0.5)
    assert outcomes[:4] == ["let in", "refused", "let in", "refused"], "one a second, to find out"
    assert outcomes[-4:] == ["let in"] * 4
