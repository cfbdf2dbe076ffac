"""Fair shares between tenants: how much service each gets, whatever its demand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.clock import Clock
from support.queueing import BATCH, REALTIME, STANDARD, put_all, queue, taken, ticket

from treeserve_router.order import ArrivalOrder, QosOrder
from treeserve_router.queue import RequestQueue, Ticket


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


def test_a_tenant_whose_requests_are_all_late_falls_behind_by_a_bounded_number_of_tokens() -> None:
    clock = Clock()
    waiting = queue(clock)
    put_all(waiting, [ticket(tenant="heavy", tokens=100, ttft_ms=100) for _ in range(200)])
    clock.now += 0.5
    put_all(waiting, [ticket(tenant="light", tokens=100, ttft_ms=100) for _ in range(10)])
    served: Counter[str] = Counter()
    for turn in range(200):
        clock.now += 0.001
        waiting.put(ticket(tenant="light", tokens=100, ttft_ms=100))
        started = taken(waiting)
        served[started.request.tenant] += started.num_tokens
        assert served["light"] - served["heavy"] <= 2048 + 100
        if turn < 20:
            assert started.request.tenant == "light", "late ones wait while their tenant is not far behind"
    assert served["heavy"] > 8000


def test_a_late_request_of_a_tenant_far_behind_is_shown_once() -> None:
    clock = Clock()
    waiting = queue(clock)
    late = [ticket(tenant="behind", ttft_ms=100) for _ in range(3)]
    put_all(waiting, late)
    clock.now += 0.2
    put_all(waiting, [on_time := ticket(tenant="ahead"), even := ticket(tenant="even", ttft_ms=100)])
    assert list(waiting.in_order()) == [on_time, even, *late]
    waiting.charge(on_time.request, 4000)
    assert list(waiting.in_order()) == [late[0], even, *late[1:], on_time]
    walk = waiting.in_order()
    shown = [next(walk)]
    waiting.charge(late[0].request, 4000)  # not behind any more
    shown += walk
    assert len(shown) == len(set(shown)) == 5


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
