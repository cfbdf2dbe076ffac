"""Requests in the router's queue."""

from __future__ import annotations

import itertools
from typing import Any

from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.mailbox import Mailbox
from treeserve_router.queue import Ticket

_numbers = itertools.count()


def ticket(
    service_class: ServiceClass = ServiceClass.STANDARD,
    prompt_tokens: int = 10,
    *,
    max_tokens: int = 16,
    ttft_ms: float | None = None,
    tenant: str = "",
    deadline: float | None = None,
    preemptible: bool = False,
    **fields: Any,
) -> Ticket:
    """A ticket of a request of its own; `fields` are the ticket's."""
    request = RouterRequest(
        request_id=f"r{next(_numbers)}",
        prompt_token_ids=(1,) * prompt_tokens,
        generated_token_ids=(),
        sampling=SamplingParams(),
        stopping=StoppingCriteria(max_tokens=max_tokens),
        limits=SequenceLimits(service_class=service_class, ttft_ms=ttft_ms, preemptible=preemptible),
        deadline=deadline,
        tenant=tenant,
    )
    return Ticket(request, fields.pop("generated", ()), Mailbox(), **fields)
