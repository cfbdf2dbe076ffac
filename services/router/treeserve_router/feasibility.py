"""Whether a waiting request can still meet its target for the first token, and when a refused one could."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from treeserve_core.errors import OverloadedError
from treeserve_core.qos import QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket

# Newcomers are let in while they are expected to need less than this share of their target: a queue that is filled up
# to the target itself misses it half the time.
_HEADROOM = 0.6
_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 0.1, 60.0
# The pace at which waiting tickets of a class are placed is what it was over about this long, while some waited.
_PACE_MEMORY_S = 10.0
_MIN_PACE_S = 0.5
_MIN_PLACED = 2.0
_MIN_SWEEP = 64
# Where none of a class was placed for so long, what is known of it is old, and would stay if all were refused.
_OLD_S = 1.0


class Feasibility:
    """Knows the waiting tickets and how fast they are placed, and says which ones are not worth waiting any more.

    Only tickets of sheddable classes that have a target are ever refused; never a replay, never while a verifier's
    speed is unknown, and never one whose prompt alone takes longer than its target: waiting is not what fails it. What
    is expected was learned from those that ran: where none of a class did lately and none waits, one is let in, and may
    wait for as long as it takes.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, policies: Mapping[ServiceClass, QosPolicy], clock: Callable[[], float]) -> None:
        self._sheddable = frozenset(c for c in policies if policies[c].sheddable)
        self._clock = clock
        self._waiting: dict[ServiceClass, Counter[str]] = {c: Counter() for c in ServiceClass}  # by tenant
        self._paces: dict[ServiceClass, _Pace] = {c: _Pace() for c in ServiceClass}
        self._since: dict[Ticket, float] = {}
        self._latest: list[tuple[float, int, Ticket]] = []  # a heap: when to look whether a ticket is late
        self._order = itertools.count()
        self._placed_at: dict[ServiceClass, float] = {}  # or let in to find out
        self._trials: set[Ticket] = set()  # let in to find out, and waiting

    def check(self, newcomer: Ticket, verifiers: Iterable[VerifierState]) -> None:
        """Look whether a ticket may be queued.

        Raises:
            OverloadedError: if it could not be started in time.
        """
        target_s = self._target_s(newcomer)
        if target_s is None:
            return
        capable = [verifier for verifier in verifiers if verifier.can_serve(newcomer)]
        sent_now_s = _sent_now_s(newcomer, capable)
        if sent_now_s is None or _prompt_s(newcomer, capable) > target_s:
            return
        expected_s = self._queue_s(newcomer) + sent_now_s
        if expected_s > _HEADROOM * target_s and not self._may_try(newcomer):
            raise _refusal(expected_s, target_s)

    def queued(self, ticket: Ticket, verifiers: Iterable[VerifierState]) -> None:
        """A ticket waits from now on."""
        now = self._clock()
        self._since[ticket] = now
        self._waiting[ticket.request.limits.service_class][ticket.request.tenant] += 1
        target_s = self._target_s(ticket)
        if target_s is not None and ticket not in self._trials:
            capable = [verifier for verifier in verifiers if verifier.can_serve(ticket)]
            self._look_at(ticket, now + target_s - (_alone_s(ticket, capable) or 0.0))

    def waited_s(self, ticket: Ticket) -> float:
        """How long a waiting ticket has waited."""
        return self._clock() - self._since[ticket]

    def left(self, ticket: Ticket) -> None:
        """A ticket does not wait any more; nothing happens if it did not."""
        self._trials.discard(ticket)
        if self._since.pop(ticket, None) is None:
            return
        tenants = self._waiting[ticket.request.limits.service_class]
        tenants[ticket.request.tenant] -= 1
        if not tenants[ticket.request.tenant]:
            del tenants[ticket.request.tenant]

    def placed(self, ticket: Ticket) -> None:
        """A waiting ticket was placed."""
        service_class = ticket.request.limits.service_class
        self._paces[service_class].placed(self._since[ticket])
        self._placed_at[service_class] = self._clock()
        self.left(ticket)

    def looked(self) -> None:
        """All that could be placed now has been: what still waits, waits for room."""
        now = self._clock()
        for service_class, tenants in self._waiting.items():
            self._paces[service_class].looked(now, bool(tenants))

    def take_late(self, verifiers: Iterable[VerifierState]) -> list[tuple[Ticket, OverloadedError]]:
        """Waiting tickets that no verifier can start in time any more, each with what to tell its caller."""
        now, late = self._clock(), []
        states = list(verifiers)
        while self._latest and self._latest[0][0] <= now:
            _, _, ticket = heapq.heappop(self._latest)
            target_s = self._target_s(ticket)
            if ticket not in self._since or target_s is None:
                continue
            capable = [state for state in states if state.can_serve(ticket)]
            alone_s = _alone_s(ticket, capable)
            if alone_s is None or _prompt_s(ticket, capable) > target_s:
                continue
            latest = self._since[ticket] + target_s - alone_s
            if latest > now:
                self._look_at(ticket, latest)
            else:
                waited_s = max(self.waited_s(ticket), self._queue_s(ticket))
                late.append((ticket, _refusal(waited_s + alone_s, target_s)))
        return late

    @property
    def next_look(self) -> float | None:
        """When `take_late` may find something, on the clock; None for never."""
        return self._latest[0][0] if self._latest else None

    def _may_try(self, newcomer: Ticket) -> bool:
        """Whether to let in one that is expected to be late, to find out."""
        service_class, now = newcomer.request.limits.service_class, self._clock()
        if self._waiting[service_class] or now - self._placed_at.get(service_class, now) < _OLD_S:
            return False
        self._placed_at[service_class] = now
        self._trials.add(newcomer)
        return True

    def _target_s(self, ticket: Ticket) -> float | None:
        """The target that the ticket may be refused for."""
        limits = ticket.request.limits
        if ticket.is_replay or limits.ttft_ms is None or limits.service_class not in self._sheddable:
            return None
        return limits.ttft_ms / 1000

    def _look_at(self, ticket: Ticket, when: float) -> None:
        heapq.heappush(self._latest, (when, next(self._order), ticket))
        if len(self._latest) > 2 * len(self._since) + _MIN_SWEEP:  # most have left: theirs need not be kept till then
            self._latest = [entry for entry in self._latest if entry[2] in self._since]
            heapq.heapify(self._latest)

    def _queue_s(self, newcomer: Ticket) -> float:
        """How long a newcomer would wait for a place: tenants take turns, so only as long as its own tenant's queue."""
        tenants = self._waiting[newcomer.request.limits.service_class]
        per_s = self._paces[newcomer.request.limits.service_class].per_s
        if not tenants or not per_s:
            return 0.0
        return min(tenants[newcomer.request.tenant] * len(tenants), tenants.total()) / per_s


class _Pace:
    """How many waiting tickets of a class are placed a second while some wait; old times count less."""

    def __init__(self) -> None:
        self._placed = 0.0
        self._busy_s = 0.0
        self._looked_at = -math.inf
        self._backlogged = False

    def placed(self, waiting_since: float) -> None:
        """A ticket was placed; one that never had to wait for room says nothing."""
        if self._backlogged and waiting_since <= self._looked_at:
            self._placed += 1

    def looked(self, now: float, backlogged: bool) -> None:
        """The queue was gone through."""
        if self._backlogged:
            fade = math.exp((self._looked_at - now) / _PACE_MEMORY_S)
            self._placed *= fade
            self._busy_s = self._busy_s * fade + (now - self._looked_at)
        self._looked_at, self._backlogged = now, backlogged

    @property
    def per_s(self) -> float:
        """The pace; 0 if it is not known."""
        known = self._busy_s >= _MIN_PACE_S and self._placed >= _MIN_PLACED
        return self._placed / self._busy_s if known else 0.0


def _prompt_s(ticket: Ticket, capable: list[VerifierState]) -> float:
    """Time to compute the ticket's prompt at the rate that verifiers promise, which must be known."""
    return min(v.uncached_tokens(ticket) / v.latency.prefill_tokens_per_s for v in capable)


def _alone_s(ticket: Ticket, capable: list[VerifierState]) -> float | None:
    """Time to the ticket's first token if no prompt is before it; None if that of any verifier is not known."""
    service_class = ticket.request.limits.service_class
    return _least(v.latency.ttft_s(v.uncached_tokens(ticket), service_class) for v in capable)


def _sent_now_s(ticket: Ticket, capable: list[VerifierState]) -> float | None:
    """Time to the ticket's first token if it is sent now; None if that of any verifier is not known."""
    return _least(v.ttft_s(ticket) for v in capable)


def _least(times: Iterable[float | None]) -> float | None:
    known: list[float] = []
    for time_s in times:
        if time_s is None:
            return None
        known.append(time_s)
    return min(known, default=None)


def _refusal(expected_s: float, target_s: float) -> OverloadedError:
    wait_s = min(max(expected_s - _HEADROOM * target_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
    reason = f"the first token would take {expected_s:.1f} s; {target_s:g} s are the target"
    return OverloadedError(reason, wait_s, "slo")
