"""A full queue: who makes room for whom, and who is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from support.clock import Clock
from support.queueing import BATCH, INTERACTIVE, REALTIME, STANDARD, put_all, queue, ticket

from treeserve_core.errors import OverloadedError
from treeserve_router.queue import RequestQueue


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
