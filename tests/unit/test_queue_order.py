"""Who goes first: deadlines, ageing, fair shares between tenants, and what makes room in a full queue."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock

from treeserve_core.errors import OverloadedError
from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.mailbox import Mailbox
from treeserve_router.order import ArrivalOrder, QosOrder
from treeserve_router.queue import RequestQueue, Ticket

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


def ticket(
    service_class: ServiceClass = STANDARD,
    tenant: str = "a",
    *,
    ttft_ms: float | None = None,
    tokens: int = 1,
    deadline: float | None = None,
    is_replay: bool = False,
) -> Ticket:
    request = RouterRequest(
        request_id="r",
        prompt_token_ids=(1,) * tokens,
        generated_token_ids=(),
        sampling=SamplingParams(),
        stopping=StoppingCriteria(max_tokens=4),
        limits=SequenceLimits(service_class=service_class, ttft_ms=ttft_ms),
        deadline=deadline,
        tenant=tenant,
    )
    return Ticket(request, (), Mailbox(), is_replay=is_replay)


def queue(clock: Clock, max_requests: int = 10_000, **options: object) -> RequestQueue:
    return RequestQueue(max_requests, 1 << 30, clock, **options)  # type: ignore[arg-type]


def put_all(waiting: RequestQueue, tickets: Sequence[Ticket]) -> None:
    for each in tickets:
        assert waiting.put(each) == []


def taken(waiting: RequestQueue) -> Ticket:
    """Dispatch the first."""
    first = next(waiting.in_order())
    assert waiting.take(first)
    return first


def served_order(waiting: RequestQueue) -> list[Ticket]:
    return [taken(waiting) for _ in range(len(waiting))]


# --- Deadlines


def test_the_earliest_deadline_of_a_tenant_goes_first_and_no_target_is_unhurried() -> None:
    clock = Clock()
    waiting = queue(clock)
    relaxed, none, tight = ticket(ttft_ms=5000), ticket(), ticket(ttft_ms=100)
    put_all(waiting, [relaxed, none, tight])
    clock.now += 0.05
    later_but_due_sooner = ticket(ttft_ms=1000)
    ends_soon = ticket(deadline=clock.now + 0.3)
    put_all(waiting, [later_but_due_sooner, ends_soon])
    assert list(waiting.in_order()) == [tight, ends_soon, later_but_due_sooner, relaxed, none]


def test_without_a_target_it_goes_before_what_comes_a_minute_later() -> None:
    clock = Clock()
    waiting = queue(clock)
    patient = ticket()
    waiting.put(patient)
    clock.now += 59
    waiting.put(early := ticket(ttft_ms=500))
    clock.now += 0.1
    assert list(waiting.in_order()) == [early, patient]
    clock.now += 1
    waiting.put(late := ticket(ttft_ms=500))
    assert list(waiting.in_order()) == [patient, late, early]  # early is late by now


def test_what_is_late_goes_behind_what_can_be_on_time_but_before_a_less_urgent_class() -> None:
    clock = Clock()
    waiting = queue(clock)
    missed, batch, hopeful = ticket(ttft_ms=100), ticket(BATCH), ticket(ttft_ms=2000)
    put_all(waiting, [missed, batch, hopeful])
    assert list(waiting.in_order()) == [missed, hopeful, batch]
    clock.now += 0.2
    assert list(waiting.in_order()) == [hopeful, missed, batch]
    assert served_order(waiting) == [hopeful, missed, batch]


def test_an_expired_request_is_not_dispatched() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [expiring := ticket(REALTIME, deadline=clock.now + 1), other := ticket()])
    assert list(waiting.in_order()) == [expiring, other]
    clock.now += 1
    assert list(waiting.in_order()) == [other]


# --- Ageing


def test_a_class_that_waited_gets_its_weights_share_and_no_more() -> None:
    clock = Clock()
    waiting = queue(clock, order=QosOrder(ageing_s=10))
    put_all(waiting, [ticket(BATCH) for _ in range(100)])
    clock.now += 9
    put_all(waiting, [ticket(REALTIME) for _ in range(200)])
    classes = Counter(taken(waiting).request.limits.service_class for _ in range(20))
    assert classes == {REALTIME: 20}, "not aged yet"
    clock.now += 2
    classes = Counter(taken(waiting).request.limits.service_class for _ in range(90))
    assert classes == {REALTIME: 80, BATCH: 10}  # weights 8 and 1


def test_one_walk_shares_as_many_would() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [ticket(c, tenant) for c in (BATCH, STANDARD, REALTIME) for tenant in "ab" * 20])
    clock.now += 60
    expected = list(waiting.in_order())
    assert served_order(waiting) == expected
    first = Counter(each.request.limits.service_class for each in expected[:22])
    assert first == {REALTIME: 16, STANDARD: 4, BATCH: 2}


@pytest.mark.parametrize("service_class", ServiceClass)
@pytest.mark.parametrize("ttft_ms", [None, 50, 5000])
def test_nothing_starves_however_much_that_is_more_urgent_keeps_coming(
    service_class: ServiceClass, ttft_ms: float | None
) -> None:
    """Three times as much comes as is dispatched, of every class, tenant and target, for ever."""
    rng, clock = random.Random(service_class), Clock()
    waiting = queue(clock)

    def arrive(num: int) -> None:
        for _ in range(num):
            waiting.put(ticket(rng.choice(list(ServiceClass)), rng.choice("ab"), ttft_ms=rng.choice([None, 50, 5000])))

    arrive(40)
    marked = ticket(service_class, "a", ttft_ms=ttft_ms)
    waiting.put(marked)
    step_s, arrivals = 0.5, 3
    weights = {c: policy.weight for c, policy in DEFAULT_POLICIES.items()}
    # Of its own class only what comes within its patience goes before it, and as much of the other tenant; of what is
    # late every fourth at the least. For each of those, every class goes as often as its weight says, and once more.
    ahead = 40 + 60 / step_s * arrivals / len(ServiceClass)
    others = sum(weight / weights[REALTIME] + 1 for weight in weights.values())
    bound = 10 / step_s + 4 * ahead * others * weights[REALTIME] / weights[service_class]
    for dispatch in count():
        assert dispatch < bound, "starved"
        arrive(arrivals)
        clock.now += step_s
        if taken(waiting) is marked:
            break


def test_of_what_is_late_and_aged_every_fourth_turn_of_its_tenant_is_one() -> None:
    clock = Clock()
    waiting = queue(clock)
    late = [ticket(ttft_ms=50) for _ in range(10)]
    put_all(waiting, late)
    for _ in range(8):
        put_all(waiting, [ticket(ttft_ms=60_000) for _ in range(5)])
        clock.now += 1
        assert taken(waiting) not in late, "not aged yet"
    clock.now += 3
    turns = [taken(waiting) for _ in range(20)]
    assert [turn for turn in turns if turn in late] == late[:5]
    assert all(turn in late for turn in turns[::4])


def test_a_long_backlog_that_aged_does_not_hold_up_the_urgent() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [ticket(BATCH) for _ in range(1000)])
    clock.now += 3600
    for _ in range(50):
        assert taken(waiting).request.limits.service_class is BATCH, "nothing else waits"
    waiting.put(urgent := ticket(REALTIME, ttft_ms=500))
    assert urgent in list(islice(waiting.in_order(), 2))


# --- Fair shares


def serve(
    waiting: RequestQueue, rng: random.Random, demand: dict[str, int], lengths: dict[str, tuple[int, int]], steps: int
) -> Counter[str]:
    """Keep each tenant's backlog at its demand, and 16 places busy; tokens served by tenant."""
    running: list[tuple[Ticket, int]] = []
    served: Counter[str] = Counter()
    for _ in range(steps):
        backlog = Counter(each.request.tenant for each in waiting.in_order())
        for tenant, size in demand.items():
            for _ in range(size - backlog[tenant]):
                waiting.put(ticket(tenant=tenant, tokens=rng.randint(1, lengths[tenant][0])))
        while len(running) < 16:
            started = taken(waiting)
            served[started.request.tenant] += started.num_tokens
            running.append((started, rng.randint(1, lengths[started.request.tenant][1])))
        for started, _ in running:
            waiting.charge(started.request, 1)
            served[started.request.tenant] += 1
        running = [(started, left - 1) for started, left in running if left > 1]
    return served


@pytest.mark.parametrize("lengths", [{"a": (50, 50), "b": (50, 50)}, {"a": (20, 10), "b": (200, 100)}])
def test_equal_weights_get_equal_service_at_ten_times_the_demand(lengths: dict[str, tuple[int, int]]) -> None:
    served = serve(queue(Clock()), random.Random(1), {"a": 50, "b": 5}, lengths, 1000)
    assert served["a"] == pytest.approx(served["b"], rel=0.05)


def test_in_order_of_arrival_the_same_demand_gets_ten_times_the_service() -> None:
    lengths = {"a": (50, 50), "b": (50, 50)}
    served = serve(queue(Clock(), order=ArrivalOrder()), random.Random(1), {"a": 50, "b": 5}, lengths, 1000)
    assert served["a"] > 5 * served["b"]


def test_service_follows_the_weights() -> None:
    waiting = queue(Clock(), weight_of={"a": 1.0, "b": 3.0}.__getitem__)
    served = serve(waiting, random.Random(2), {"a": 20, "b": 20}, {"a": (50, 50), "b": (50, 50)}, 1000)
    assert served["b"] == pytest.approx(3 * served["a"], rel=0.05)


def test_a_tenant_that_was_away_has_saved_up_nothing() -> None:
    clock = Clock()
    waiting = queue(clock)
    for _ in range(50):  # alone for a while
        waiting.put(ticket(tenant="a", tokens=100))
        taken(waiting)
    put_all(waiting, [ticket(tenant="a", tokens=10) for _ in range(20)])
    put_all(waiting, [ticket(tenant="b", tokens=10) for _ in range(20)])
    first = Counter(taken(waiting).request.tenant for _ in range(24))
    assert first["b"] <= 18, "not fifty turns to make up for"
    assert abs(Counter(taken(waiting).request.tenant for _ in range(10))["a"] - 5) <= 5


def test_output_tokens_count_as_they_come() -> None:
    waiting = queue(Clock())
    put_all(waiting, [ticket(tenant=tenant) for tenant in "aabb"])
    assert taken(waiting).request.tenant == "a"
    waiting.charge(ticket(tenant="b").request, 10)
    assert [each.request.tenant for each in waiting.in_order()] == ["a", "b", "b"]


def test_classes_keep_their_own_accounts() -> None:
    waiting = queue(Clock())
    waiting.charge(ticket(BATCH, "a").request, 1000)
    put_all(waiting, [ticket(REALTIME, "a"), ticket(REALTIME, "b")])
    assert taken(waiting).request.tenant == "a"


def test_accounts_of_tenants_that_are_gone_are_forgotten() -> None:
    order = QosOrder[Ticket]()
    waiting = queue(Clock(), order=order)
    for n in range(2500):
        waiting.put(ticket(tenant=str(n)))
        waiting.put(ticket(tenant=str(n + 1)))
        taken(waiting)
        taken(waiting)
    assert len(order._bands[STANDARD]._served) <= 2048


# --- A full queue


def test_the_urgent_displace_the_last_of_the_least_urgent() -> None:
    waiting = queue(Clock(), max_requests=3)
    put_all(waiting, [first := ticket(BATCH), last := ticket(BATCH), ticket(STANDARD)])
    ((gone, error),) = waiting.put(ticket(REALTIME))
    assert gone is last
    assert (error.cause, len(waiting)) == ("displaced", 3)
    ((gone, _),) = waiting.put(ticket(INTERACTIVE))
    assert gone is first
    with pytest.raises(OverloadedError) as refused:
        waiting.put(ticket(BATCH))
    assert refused.value.cause == "queue_requests"


def test_one_tenant_cannot_fill_the_queue_for_the_others() -> None:
    waiting = queue(Clock(), max_requests=10)
    put_all(waiting, [ticket(tenant="a") for _ in range(10)])
    for _ in range(5):
        ((gone, _),) = waiting.put(ticket(tenant="b"))
        assert gone.request.tenant == "a"
    for tenant in "ab":
        with pytest.raises(OverloadedError):
            waiting.put(ticket(tenant=tenant))
    assert Counter(each.request.tenant for each in waiting.in_order()) == {"a": 5, "b": 5}


def test_what_ran_before_is_never_displaced() -> None:
    waiting = queue(Clock(), max_requests=1)
    waiting.put(ticket(BATCH, is_replay=True))
    with pytest.raises(OverloadedError):
        waiting.put(ticket(REALTIME))


def test_memory_is_bounded() -> None:
    small, large = ticket(), ticket(tokens=1000)
    waiting = RequestQueue(10, 1 << 30, Clock(), max_bytes=small.num_bytes + large.num_bytes)
    put_all(waiting, [small, large])
    with pytest.raises(OverloadedError) as refused:
        waiting.put(ticket())
    assert refused.value.cause == "queue_bytes"
    assert large.num_bytes - small.num_bytes >= 999 * 36  # an integer object and its place for each token


def test_as_many_leave_as_a_large_newcomer_needs_or_none() -> None:
    clock = Clock()
    waiting = RequestQueue(100, 100, clock)
    put_all(waiting, [ticket(STANDARD, tokens=50), *(ticket(BATCH, tokens=10) for _ in range(5))])
    with pytest.raises(OverloadedError):
        waiting.put(ticket(STANDARD, tokens=60))
    assert len(waiting) == 6
    assert len(waiting.put(ticket(REALTIME, tokens=35))) == 4
    assert waiting.num_tokens == 50 + 10 + 35


# --- In order of arrival


def test_order_of_arrival_knows_no_classes_targets_or_tenants() -> None:
    clock = Clock()
    waiting = queue(clock, max_requests=4, order=ArrivalOrder())
    tickets = [ticket(BATCH, "a"), ticket(REALTIME, "b", ttft_ms=1), ticket(STANDARD, "a")]
    put_all(waiting, tickets)
    put_all(waiting, [replay := ticket(BATCH, is_replay=True)])
    clock.now += 100
    assert list(waiting.in_order()) == [replay, *tickets]
    with pytest.raises(OverloadedError):
        waiting.put(ticket(REALTIME))
    assert served_order(waiting) == [replay, *tickets]


# --- The iterator


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ServiceClass), st.sampled_from("abc"), st.sampled_from([None, 50.0, 500.0]), st.booleans()
        ),
        max_size=40,
    ),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_the_queue_may_change_under_its_iterator(
    made: list[tuple[ServiceClass, str, float | None, bool]], deeds: list[int]
) -> None:
    clock = Clock()
    waiting = queue(clock)
    tickets = [ticket(c, tenant, ttft_ms=ttft_ms, is_replay=replay) for c, tenant, ttft_ms, replay in made]
    put_all(waiting, tickets)
    clock.now += 0.1
    gone: set[int] = set()
    given_out: list[Ticket] = []
    for each, deed in zip(waiting.in_order(), [*deeds, *[0] * len(tickets)], strict=False):
        assert id(each) not in gone
        given_out.append(each)
        if deed == 1:
            waiting.take(each)
            gone.add(id(each))
        elif deed == 2 and (others := [t for t in tickets if id(t) not in gone and t not in given_out]):
            waiting.remove(others[-1])
            gone.add(id(others[-1]))
        elif deed == 3:
            waiting.charge(each.request, 7)
    assert len(set(map(id, given_out))) == len(given_out), "twice"
    assert {id(t) for t in tickets} == gone | {id(t) for t in given_out}
    assert {id(t) for t in waiting.in_order()} == {id(t) for t in tickets} - gone


def test_the_first_few_are_cheap_however_many_wait() -> None:
    def seconds(num_waiting: int) -> float:
        rng, waiting = random.Random(3), queue(Clock(), max_requests=1 << 20)
        classes = list(ServiceClass)
        put_all(waiting, [ticket(rng.choice(classes), str(rng.randrange(50)), ttft_ms=500) for _ in range(num_waiting)])
        took = []
        for _ in range(5):
            started = time.process_time()
            for _ in range(20):
                taken(waiting)
            took.append(time.process_time() - started)
        return min(took)

    assert seconds(10_000) < 10 * seconds(100)
