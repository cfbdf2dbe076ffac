"""The router's queue: order, bounds, and what it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock
from support.tickets import ticket as any_ticket

from treeserve_core.errors import OverloadedError
from treeserve_core.sampling import ServiceClass
from treeserve_router.queue import RequestQueue, Ticket


def ticket(
    service_class: ServiceClass = ServiceClass.STANDARD, prompt_tokens: int = 1, is_replay: bool = False
) -> Ticket:
    generated = (2, 2) if is_replay else ()
    return any_ticket(service_class, prompt_tokens, max_tokens=4, generated=generated, is_replay=is_replay)


def queue(max_requests: int = 10, max_tokens: int = 100, clock: Clock | None = None) -> RequestQueue:
    return RequestQueue(max_requests, max_tokens, clock or Clock())


def test_bands_by_urgency_and_first_in_first_out_inside() -> None:
    waiting = queue()
    tickets = [ticket(c) for c in (ServiceClass.BATCH, ServiceClass.STANDARD, ServiceClass.REALTIME)]
    tickets += [ticket(c) for c in (ServiceClass.STANDARD, ServiceClass.REALTIME, ServiceClass.INTERACTIVE)]
    for each in tickets:
        waiting.put(each)
    assert [tickets.index(each) for each in waiting.in_order()] == [2, 4, 5, 1, 3, 0]


def test_replays_wait_in_front_of_their_band_and_are_never_refused() -> None:
    waiting = queue(max_requests=2)
    first, second, replay, later = ticket(), ticket(), ticket(is_replay=True), ticket(is_replay=True)
    urgent = ticket(ServiceClass.REALTIME, is_replay=True)
    for each in (first, second, replay, later, urgent):
        waiting.put(each)
    assert list(waiting.in_order()) == [urgent, replay, later, first, second]


def test_the_number_of_requests_is_bounded() -> None:
    waiting = queue(max_requests=2)
    kept = ticket()
    waiting.put(kept)
    waiting.put(ticket(ServiceClass.REALTIME))
    with pytest.raises(OverloadedError):
        waiting.put(ticket())
    assert waiting.remove(kept)
    waiting.put(ticket())


def test_prompt_tokens_are_bounded_but_an_empty_queue_takes_any_request() -> None:
    waiting = queue(max_tokens=10)
    large = ticket(prompt_tokens=50)
    waiting.put(large)
    with pytest.raises(OverloadedError):
        waiting.put(ticket())
    assert waiting.remove(large)
    waiting.put(ticket(prompt_tokens=9))
    waiting.put(ticket(prompt_tokens=1))
    with pytest.raises(OverloadedError):
        waiting.put(ticket())


def test_the_delay_of_a_refusal_follows_the_wait() -> None:
    clock = Clock()
    waiting = queue(max_requests=1, clock=clock)
    waiting.put(ticket())
    delays = []
    for now in (100.0, 107.0, 1000.0):
        clock.now = now
        with pytest.raises(OverloadedError) as caught:
            waiting.put(ticket())
        delays.append(caught.value.retry_after_s)
    assert delays == [1.0, 7.0, 60.0]


def test_depth_and_age_per_class() -> None:
    clock = Clock()
    waiting = queue(clock=clock)
    oldest = ticket(ServiceClass.BATCH)
    waiting.put(oldest)
    clock.now += 5
    waiting.put(ticket(ServiceClass.BATCH, is_replay=True))
    clock.now += 2
    assert (waiting.depth(ServiceClass.BATCH), waiting.age_s(ServiceClass.BATCH)) == (2, 7.0)
    assert (waiting.depth(ServiceClass.REALTIME), waiting.age_s(ServiceClass.REALTIME)) == (0, 0.0)
    waiting.remove(oldest)
    assert waiting.age_s(ServiceClass.BATCH) == 2.0


def test_removing_twice_is_harmless() -> None:
    waiting = queue()
    mine = ticket()
    waiting.put(mine)
    assert waiting.remove(mine)
    assert not waiting.remove(mine)
    assert (len(waiting), waiting.num_tokens) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(ServiceClass), st.integers(1, 30), st.booleans(), st.booleans())))
def test_counts_agree_with_the_content(operations: list[tuple[ServiceClass, int, bool, bool]]) -> None:
    waiting = queue()
    for service_class, prompt_tokens, is_replay, remove_one in operations:
        made = ticket(service_class, prompt_tokens, is_replay)
        try:
            waiting.put(made)
        except OverloadedError:
            assert not is_replay
            assert made not in list(waiting.in_order())
        if remove_one and len(waiting):
            waiting.remove(next(waiting.in_order()))
        content = list(waiting.in_order())
        assert len(waiting) == len(content) == sum(waiting.depth(c) for c in ServiceClass)
        assert waiting.num_tokens == sum(each.num_tokens for each in content)
        assert content == sorted(content, key=lambda t: t.request.limits.service_class)
