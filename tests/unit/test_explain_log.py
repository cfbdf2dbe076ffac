"""What the router remembers of its decisions."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from support.clock import Clock
from support.dispatching import BookedPool
from support.tickets import ticket

from treeserve_core.errors import NotFoundError, OverloadedError, PermissionDeniedError
from treeserve_core.sampling import ServiceClass
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.explain import NO_DECISIONS, DecisionKind, DecisionLog
from treeserve_router.queue import RequestQueue

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_decisions_come_in_order_and_repeats_are_counted(clock: Clock) -> None:
    log, request = DecisionLog(clock, 10, "router-7"), ticket(BATCH).request
    log.note(request, DecisionKind.QUEUED)
    clock.now += 1
    for _ in range(3):
        log.note(request, DecisionKind.BLOCKED, "full")
    clock.now += 1
    log.note(request, DecisionKind.BLOCKED, "fuller")
    told = log.explain(request.request_id, "")
    assert (told.router_id, told.service_class, told.age_s, told.dropped) == ("router-7", BATCH, 2.0, 0)
    assert [(d.kind, d.at, d.reason, d.repeats) for d in told.decisions] == [
        (DecisionKind.QUEUED, 100.0, "", 0),
        (DecisionKind.BLOCKED, 101.0, "full", 2),
        (DecisionKind.BLOCKED, 102.0, "fuller", 0),
    ]


@pytest.mark.parametrize("prefix", ["cmpl-", "chatcmpl-"])
def test_the_id_of_an_http_answer_names_its_request(clock: Clock, prefix: str) -> None:
    log, request = DecisionLog(clock, 10), ticket().request
    log.note(request, DecisionKind.QUEUED)
    assert log.explain(prefix + request.request_id, "").request_id == request.request_id
    own = replace(request, request_id=prefix + request.request_id)  # a client may choose it
    log.note(own, DecisionKind.REFUSED)
    assert log.explain(own.request_id, "").decisions[0].kind is DecisionKind.REFUSED


def test_memory_is_bounded_in_requests_and_in_decisions(clock: Clock) -> None:
    log, requests = DecisionLog(clock, 2), [ticket().request for _ in range(3)]
    for request in requests:
        for i in range(100):
            log.note(request, DecisionKind.BLOCKED, str(i))
    with pytest.raises(NotFoundError):
        log.explain(requests[0].request_id, "")
    told = log.explain(requests[2].request_id, "")
    assert (len(told.decisions), told.dropped, told.decisions[-1].reason) == (64, 36, "99")


def test_nobody_learns_of_others_requests(clock: Clock) -> None:
    log, request = DecisionLog(clock, 2), ticket(tenant="mine").request
    log.note(request, DecisionKind.QUEUED)
    assert log.explain(request.request_id, "mine").decisions
    for tenant in ("other", "", None):
        with pytest.raises(NotFoundError):
            log.explain(request.request_id, tenant)
    unknown = ticket(tenant="").request
    log.note(unknown, DecisionKind.QUEUED)
    with pytest.raises(NotFoundError):
        log.explain(unknown.request_id, None)


def test_two_tenants_may_use_the_same_id(clock: Clock) -> None:
    log, mine = DecisionLog(clock, 2), ticket(BATCH, tenant="mine").request
    theirs = replace(ticket(REALTIME, tenant="theirs").request, request_id=mine.request_id)
    for request in (mine, theirs, mine):
        log.note(request, DecisionKind.BLOCKED, request.tenant)
    told = {tenant: log.explain(mine.request_id, tenant) for tenant in ("mine", "theirs")}
    assert [told[tenant].service_class for tenant in told] == [BATCH, REALTIME]
    assert [[(d.reason, d.repeats) for d in told[tenant].decisions] for tenant in told] == [
        [("mine", 1)],
        [("theirs", 0)],
    ]


def test_no_request_is_kept_alive(clock: Clock) -> None:
    log, request = DecisionLog(clock, 2), ticket(BATCH, tenant="mine").request
    log.note(request, DecisionKind.QUEUED)
    request_id, kept = request.request_id, weakref.ref(request)
    del request
    gc.collect()
    assert kept() is None
    assert log.explain(request_id, "mine").service_class is BATCH


def test_a_log_that_is_off_remembers_nothing_and_says_so(clock: Clock) -> None:
    for log in (NO_DECISIONS, DecisionLog(clock)):
        request = ticket().request
        log.note(request, DecisionKind.QUEUED)
        with pytest.raises(PermissionDeniedError):
            log.explain(request.request_id, "")


def test_a_requests_way_is_told(clock: Clock) -> None:
    pool, log = BookedPool(clock, 2), DecisionLog(clock, 10)
    dispatcher = Dispatcher(RequestQueue(3, 10**6, clock), pool, 10.0, clock, decisions=log)
    first, second = pool.verifiers
    first.report(sequences=4, step_s=0.01, prefill_tokens_per_s=1000)
    second.report(draining=True)
    head, mine = ticket(STANDARD, 40), ticket(STANDARD, 300)
    for each in (head, mine):
        dispatcher.submit(each)
    dispatcher.dispatch()
    clock.now += 3
    dispatcher.dispatch()
    first.report(sequences=0, step_s=0.01, prefill_tokens_per_s=1000)
    dispatcher.dispatch()
    told = log.explain(head.request.request_id, "").decisions
    assert [(d.kind.value, d.repeats) for d in told] == [("queued", 0), ("blocked", 1), ("placed", 0)]
    assert "1 verifier(s) with no free place" in told[1].reason
    assert told[2].verifier_id == "a"
    assert told[2].cost is not None
    assert told[2].cost.prefill_s == pytest.approx(0.04)
    behind = log.explain(mine.request.request_id, "").decisions
    assert [d.kind.value for d in behind] == ["queued", "placed"]
    assert "1 as urgent requests wait" in behind[0].reason
    assert "after 3.000 s behind a request that found 1 verifier(s) with no free place" in behind[1].reason


def test_hedges_and_refusals_are_told(clock: Clock) -> None:
    pool, log = BookedPool(clock, 2), DecisionLog(clock, 10)
    dispatcher = Dispatcher(RequestQueue(1, 10**6, clock), pool, 10.0, clock, decisions=log)
    for verifier in pool.verifiers:
        verifier.report()
    hedge = ticket()
    assert dispatcher.place_now(hedge, avoiding="a")
    (decision,) = log.explain(hedge.request.request_id, "").decisions
    assert (decision.kind, decision.verifier_id, decision.reason) == (DecisionKind.HEDGED, "b", "instead of a")
    for verifier in pool.verifiers:
        verifier.report(sequences=4)
    dispatcher.submit(ticket())
    refused = ticket()
    with pytest.raises(OverloadedError):
        dispatcher.submit(refused)
    (decision,) = log.explain(refused.request.request_id, "").decisions
    assert decision.kind is DecisionKind.REFUSED
    assert "full" in decision.reason
