"""Router queues on a test's clock, and what is put into them and taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.clock import Clock
from support.tickets import ticket as any_ticket
from treeserve_core.sampling import ServiceClass
from treeserve_router.queue import RequestQueue, Ticket

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


def ticket(service_class: ServiceClass = STANDARD, tenant: str = "a", *, tokens: int = 1, **more: Any) -> Ticket:
    """A ticket of a request that needs little."""
    return any_ticket(service_class, tokens, max_tokens=4, tenant=tenant, **more)


def queue(clock: Clock, max_requests: int = 10_000, **options: Any) -> RequestQueue:
    """A queue of the default policies unless told otherwise."""
    return RequestQueue(max_requests, 1 << 30, clock, **options)


def put_all(waiting: RequestQueue, tickets: Sequence[Ticket]) -> None:
    """Put them in; none may displace another."""
    for each in tickets:
        assert waiting.put(each) == []


def taken(waiting: RequestQueue) -> Ticket:
    """Dispatch the first."""
    first = next(waiting.in_order())
    assert waiting.take(first)
    return first


def served_order(waiting: RequestQueue) -> list[Ticket]:
    """Dispatch all."""
    return [taken(waiting) for _ in range(len(waiting))]
