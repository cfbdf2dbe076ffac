"""The requests that wait for a verifier, in the order in which they are to be dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from treeserve_core.errors import OverloadedError
from treeserve_core.sampling import ServiceClass
from treeserve_router.admission import RouterRequest
from treeserve_router.mailbox import Mailbox

_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, eq=False)
class Ticket:
    """One try at running a request. A replay is a new ticket of the same request.

    Attributes:
        generated_token_ids: output tokens that exist already.
        mailbox: where its events go.
        preferred_verifier: id of the verifier its session used last; empty for none.
        traceparent: W3C trace context of the request's span; empty for none.
        is_replay: it was dispatched before, so it waits in front and is never refused.
    """

    request: RouterRequest
    generated_token_ids: tuple[int, ...]
    mailbox: Mailbox = field(repr=False)
    preferred_verifier: str = ""
    traceparent: str = ""
    is_replay: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens a verifier must prefill."""
        return len(self.request.prompt_token_ids) + len(self.generated_token_ids)


class RequestQueue:
    """Class bands, the most urgent first; first in, first out inside a band.

    Args:
        max_requests, max_tokens: what may wait in all, beyond which newcomers are refused.
        clock: seconds, monotonic.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        # Insertion order is queue order; the value is when the ticket came.
        self._replays: dict[ServiceClass, dict[Ticket, float]] = {c: {} for c in ServiceClass}
        self._bands: dict[ServiceClass, dict[Ticket, float]] = {c: {} for c in ServiceClass}
        self._num_tokens = 0

    def put(self, ticket: Ticket) -> None:
        """Add a ticket: a newcomer at the end of its band, a replay in front of the band's newcomers.

        Raises:
            OverloadedError: if a newcomer exceeds a bound; an empty queue takes any one request.
        """
        if not ticket.is_replay and len(self) > 0:
            self._check_bounds(ticket)
        lane = self._replays if ticket.is_replay else self._bands
        lane[ticket.request.limits.service_class][ticket] = self._clock()
        self._num_tokens += ticket.num_tokens

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out; False if it is not here."""
        for lane in (self._replays, self._bands):
            if lane[ticket.request.limits.service_class].pop(ticket, None) is not None:
                self._num_tokens -= ticket.num_tokens
                return True
        return False

    def in_order(self) -> Iterator[Ticket]:
        """Waiting tickets in dispatch order, as of now: the queue may change while the caller goes through them."""
        waiting = [ticket for c in ServiceClass for lane in (self._replays, self._bands) for ticket in lane[c]]
        return iter(waiting)

    def __len__(self) -> int:
        return sum(self.depth(c) for c in ServiceClass)

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting tickets."""
        return self._num_tokens

    def depth(self, service_class: ServiceClass) -> int:
        """Tickets of a class that wait."""
        return len(self._replays[service_class]) + len(self._bands[service_class])

    def age_s(self, service_class: ServiceClass) -> float:
        """How long the oldest ticket of a class has waited; 0 if none waits."""
        waiting = (*self._replays[service_class].values(), *self._bands[service_class].values())
        return self._clock() - min(waiting) if waiting else 0.0

    def _check_bounds(self, ticket: Ticket) -> None:
        if len(self) >= self._max_requests:
            raise OverloadedError(f"{len(self)} requests wait already", self._retry_after_s(ticket))
        if self._num_tokens + ticket.num_tokens > self._max_tokens:
            raise OverloadedError(f"{self._num_tokens} prompt tokens wait already", self._retry_after_s(ticket))

    def _retry_after_s(self, ticket: Ticket) -> float:
        """About as long as the oldest of its class has waited: that is what a newcomer would wait."""
        age_s = self.age_s(ticket.request.limits.service_class)
        return min(max(age_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
