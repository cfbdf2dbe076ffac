"""Who goes first: deadlines, ageing, order of arrival, and a queue that changes under its iterator."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock
from support.queueing import BATCH, REALTIME, STANDARD, put_all, queue, served_order, taken, ticket

from treeserve_core.errors import OverloadedError
from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import ServiceClass
from treeserve_router.order import ArrivalOrder, QosOrder
from treeserve_router.queue import Ticket


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


def test_what_is_late_goes_behind_all_that_can_be_on_time_until_it_ages() -> None:
    clock = Clock()
    waiting = queue(clock)
    missed, batch, hopeful = ticket(ttft_ms=100), ticket(BATCH), ticket(ttft_ms=20_000)
    tardy = ticket(BATCH, ttft_ms=100)
    put_all(waiting, [tardy, missed, batch, hopeful])
    assert list(waiting.in_order()) == [missed, hopeful, tardy, batch]
    clock.now += 0.2
    assert list(waiting.in_order()) == [hopeful, batch, missed, tardy]
    assert served_order(waiting) == [hopeful, batch, missed, tardy]
    put_all(waiting, [missed, batch, hopeful])
    clock.now += 10
    assert list(waiting.in_order()) == [hopeful, missed, batch], "aged, before the less urgent class"


def test_what_ran_before_stays_in_front_though_it_is_late() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [again := ticket(ttft_ms=100, is_replay=True), fresh := ticket(ttft_ms=2000)])
    clock.now += 0.2
    assert list(waiting.in_order()) == [again, fresh]


def test_a_class_that_aged_gets_its_share_though_a_more_urgent_one_is_late() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [ticket(BATCH) for _ in range(20)])
    clock.now += 11
    put_all(waiting, [ticket(REALTIME, ttft_ms=10) for _ in range(20)])
    clock.now += 0.1
    put_all(waiting, [ticket(STANDARD) for _ in range(40)])
    classes = Counter(taken(waiting).request.limits.service_class for _ in range(30))
    assert classes == {STANDARD: 20, BATCH: 10}  # weights 2 and 1


def test_what_is_lost_is_walked_once_however_much_of_it_aged() -> None:
    clock = Clock()
    waiting = queue(clock)
    aged = [ticket(tenant="ab"[i % 2], ttft_ms=50) for i in range(6)]
    put_all(waiting, aged)
    clock.now += 9
    lost = [ticket(tenant="ab"[i % 2], ttft_ms=50) for i in range(6)]
    put_all(waiting, lost)
    clock.now += 2
    put_all(waiting, [on_time := ticket(BATCH, ttft_ms=5000)])
    assert list(waiting.in_order()) == [*aged, on_time, *lost]


def test_an_expired_request_is_not_dispatched() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [expiring := ticket(REALTIME, deadline=clock.now + 1), other := ticket()])
    assert list(waiting.in_order()) == [expiring, other]
    clock.now += 1
    assert list(waiting.in_order()) == [other]


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
