"""The requests that wait for a verifier, in the order in which they are to be dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from treeserve_core.errors import OverloadedError
from treeserve_core.sampling import ServiceClass
from treeserve_router.admission import RouterRequest
from treeserve_router.backlog import Entry
from treeserve_router.mailbox import Mailbox
from treeserve_router.order import Order, QosOrder

_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
# Of two requests of a tenant and class, the one that came this much earlier goes first whatever their targets.
_LONGEST_PATIENCE_S = 60.0
# Estimates for the bound in bytes: a token is an integer object and its place in a tuple.
_BYTES_PER_TOKEN = 36
_BYTES_PER_BIAS = 100
_BYTES_PER_REQUEST = 8192
DEFAULT_MAX_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Ticket:
    """One try at running a request. A replay is a new ticket of the same request.

    Attributes:
        generated_token_ids: output tokens that exist already.
        mailbox: where its events go.
        preferred_verifier: id of the verifier its session used last; empty for none.
        session_epoch: number of this turn of its session, growing at all routers; 0 if nobody counts.
        prefix_tokens: by verifier id, how many tokens from the first on it is believed to hold the KV of.
        traceparent: W3C trace context of the request's span; empty for none.
        is_replay: it was dispatched before, so it waits in front and is never refused.
    """

    request: RouterRequest
    generated_token_ids: tuple[int, ...]
    mailbox: Mailbox = field(repr=False)
    preferred_verifier: str = ""
    session_epoch: int = 0
    prefix_tokens: Mapping[str, int] = field(default_factory=dict, repr=False)
    traceparent: str = ""
    is_replay: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens a verifier must prefill."""
        return len(self.request.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory while it waits."""
        text = sum(len(stop) for stop in self.request.stopping.stop_strings)
        biases = len(self.request.sampling.logit_bias)
        return _BYTES_PER_REQUEST + _BYTES_PER_TOKEN * self.num_tokens + _BYTES_PER_BIAS * biases + text


@dataclass(frozen=True)
class QueueBounds:
    """What may wait in all. An empty queue takes any one request."""

    requests: int
    tokens: int
    bytes: int = DEFAULT_MAX_BYTES

    def exceeded_by(self, load: QueueLoad) -> str:
        """The first bound that a load exceeds; empty for none."""
        if load.requests > self.requests:
            return "requests"
        if load.tokens > self.tokens:
            return "tokens"
        return "bytes" if load.bytes > self.bytes else ""


@dataclass(frozen=True)
class QueueLoad:
    """How much waits."""

    requests: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, ticket: Ticket, times: int = 1) -> QueueLoad:
        """With one more ticket, or (times = -1) one less."""
        return QueueLoad(
            self.requests + times, self.tokens + times * ticket.num_tokens, self.bytes + times * ticket.num_bytes
        )


class RequestQueue:
    """What waits, within bounds, in the order that an `Order` gives it.

    Args:
        max_requests, max_tokens, max_bytes: what may wait in all, beyond which newcomers are refused.
        clock: seconds, monotonic; the one that requests' deadlines are on.
        order: who goes first; by service level if not given.
        weight_of: a tenant's weight in fair shares, by its label.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        clock: Callable[[], float],
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        order: Order[Ticket] | None = None,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        self._bounds = QueueBounds(max_requests, max_tokens, max_bytes)
        self._clock = clock
        self._order = QosOrder() if order is None else order
        self._weight_of = weight_of
        # Insertion order is that of arrival.
        self._entries: dict[ServiceClass, dict[Ticket, Entry[Ticket]]] = {c: {} for c in ServiceClass}
        self._load = QueueLoad()
        self._number = 0

    def put(self, ticket: Ticket) -> list[tuple[Ticket, OverloadedError]]:
        """Add a ticket. To let a newcomer into a full queue, what has less of a claim to wait leaves it.

        Returns the tickets that left, each with the error that its owner is to be told.

        Raises:
            OverloadedError: if a newcomer exceeds a bound even so; nothing leaves then.
        """
        entry = self._entry(ticket)
        displaced = [] if ticket.is_replay or len(self) == 0 else self._make_room(entry)
        self._entries[entry.service_class][ticket] = entry
        self._order.add(entry)
        self._load = self._load.plus(ticket)
        return displaced

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out that is not wanted any more; False if it is not here."""
        entry = self._pop(ticket)
        if entry is not None:
            self._order.remove(entry)
        return entry is not None

    def take(self, ticket: Ticket) -> bool:
        """Take a ticket out to be dispatched: its tenant is charged with what it prefills. False if it is not here."""
        entry = self._pop(ticket)
        if entry is not None:
            self._order.take(entry, self._clock())
        return entry is not None

    def charge(self, request: RouterRequest, num_tokens: int) -> None:
        """Charge the tenant of a request with tokens that were generated for it."""
        cost = num_tokens / self._weight_of(request.tenant)
        self._order.charge(request.limits.service_class, request.tenant, cost)

    def in_order(self) -> Iterator[Ticket]:
        """Waiting tickets in dispatch order, as of now. The queue may change while the caller goes through them.

        Lazy: the first few are cheap, however many wait. Tickets whose request's deadline has passed are not among
        them: their owners are about to withdraw them.
        """
        now = self._clock()
        for entry in self._order.walk(now):
            deadline = entry.item.request.deadline
            has_expired = deadline is not None and deadline <= now
            if not has_expired and entry.item in self._entries[entry.service_class]:
                yield entry.item

    def __len__(self) -> int:
        return self._load.requests

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting tickets."""
        return self._load.tokens

    def depth(self, service_class: ServiceClass) -> int:
        """Tickets of a class that wait."""
        return len(self._entries[service_class])

    def age_s(self, service_class: ServiceClass) -> float:
        """How long the oldest ticket of a class has waited; 0 if none waits."""
        entries = self._entries[service_class]
        return self._clock() - next(iter(entries.values())).arrived if entries else 0.0

    def _entry(self, ticket: Ticket) -> Entry[Ticket]:
        now = self._clock()
        limits, deadline = ticket.request.limits, ticket.request.deadline
        due = min(inf if limits.ttft_ms is None else now + limits.ttft_ms / 1000, inf if deadline is None else deadline)
        self._number += 1
        return Entry(
            item=ticket,
            number=self._number,
            urgent_at=-inf if ticket.is_replay else min(due, now + _LONGEST_PATIENCE_S),
            arrived=now,
            due=due,
            service_class=limits.service_class,
            tenant=ticket.request.tenant,
            cost=0.0 if ticket.is_replay else ticket.num_tokens / self._weight_of(ticket.request.tenant),
            is_replay=ticket.is_replay,
        )

    def _pop(self, ticket: Ticket) -> Entry[Ticket] | None:
        entry = self._entries[ticket.request.limits.service_class].pop(ticket, None)
        if entry is not None:
            self._load = self._load.plus(ticket, -1)
        return entry

    def _make_room(self, newcomer: Entry[Ticket]) -> list[tuple[Ticket, OverloadedError]]:
        """Take out what must leave for the newcomer to fit. Raises OverloadedError, and takes nothing, if it cannot."""
        load, leaving = self._load.plus(newcomer.item), list[Ticket]()
        if not self._bounds.exceeded_by(load):
            return []
        for victim in self._order.victims(newcomer):
            leaving.append(victim.item)
            load = load.plus(victim.item, -1)
            if not self._bounds.exceeded_by(load):
                break
        bound = self._bounds.exceeded_by(load)
        if bound and load.requests > 1:
            raise self._refusal(newcomer.item, f"the queue is full ({bound})", f"queue_{bound}")
        why = "the queue is full, and others have more of a claim to wait in it"
        refused = [(ticket, self._refusal(ticket, why, "displaced")) for ticket in leaving]
        for ticket in leaving:
            self.remove(ticket)
        return refused

    def _refusal(self, ticket: Ticket, reason: str, cause: str) -> OverloadedError:
        """With a delay about as long as the oldest of its class has waited: that is what a newcomer would wait."""
        age_s = self.age_s(ticket.request.limits.service_class)
        return OverloadedError(reason, min(max(age_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S), cause)
