"""How many replicas of each role the load wants, whatever their number is at present."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from treeserve_core.errors import UnavailableError
from treeserve_router.placement import VerifierState

# Rates are means of this time: who asks every 15 or 30 s misses no burst.
_WINDOW_S = 30.0
# Before so much of it is seen, nothing is known.
_LEAST_S = 10.0
# Requests that are refused come again, and count again: what verifiers do not take counts as no more than what they do.
_MOST_UNMET = 2.0
# A speculator draws trees one after another, and at half of its time they wait for half a tree on average.
_DRAFTING_SHARE = 0.5


class Role(StrEnum):
    """The roles that can be scaled."""

    ROUTER = "router"
    VERIFIER = "verifier"
    SPECULATOR = "speculator"


@dataclass(frozen=True)
class Demand:
    """What came to routers during the window.

    Attributes:
        offered: requests, refused ones included.
        begun: requests that went to a verifier.
        waiting: requests that wait now.
    """

    offered: int = 0
    begun: int = 0
    waiting: int = 0

    def plus(self, other: Demand) -> Demand:
        """Of both together."""
        return Demand(self.offered + other.offered, self.begun + other.begun, self.waiting + other.waiting)

    @property
    def unmet(self) -> float:
        """What was offered, as a multiple of what was begun; at least 1."""
        return min(max(self.offered / max(self.begun, 1), 1.0), _MOST_UNMET)


@dataclass(frozen=True)
class _Sums:
    """What happened until `at`, seconds on the clock; all of it only grows."""

    at: float
    work_s: float = 0.0
    drafting_s: float = 0.0
    stream_s: float = 0.0
    offered: int = 0
    begun: int = 0


class Autoscaler:
    """Keeps the latest half minute of load. Wanted replicas, as fractions:

        verifiers    work_s a second, over all verifiers  x  requests offered / requests begun
        speculators  drafting_s a second, over all verifiers  /  0.5
        routers      (sequences at all verifiers + waiting requests)  /  streams_per_router

    Verifiers and speculators say what they did in seconds of a replica that has enough to do (the verifier's
    `WorkMeter`), so that the sum is the same however many share the load. What they could not take has to be added:
    where twice as many requests come as are begun, twice as many verifiers are wanted; 2 is the most that this factor
    may be. Reports of verifiers cover the sequences of all routers; what others saw of `Demand` comes from
    `heard`, and is left out where routers do not share it. As long as all routers see the same mix, the quotient is the
    same even so.

    Nothing is ever 0 because it is not known: `wanted` raises then.

    Args:
        streams_per_router: requests in progress that one router is meant for.
        clock: seconds, monotonic.
    """

    def __init__(self, streams_per_router: int, clock: Callable[[], float]) -> None:
        self._streams_per_router = streams_per_router
        self._clock = clock
        self._counted: dict[str, tuple[float, float]] = {}  # by address, the latest work_s and drafting_s
        self._sums: deque[_Sums] = deque()
        self._waiting = 0
        self._others = Demand()
        self._speculators = 0
        self._unknown = "no verifier is connected"

    def observe(self, verifiers: Sequence[VerifierState], offered: int, begun: int, waiting: int) -> None:
        """Look at what there is now; to be called every second or so.

        Args:
            verifiers: those that are connected.
            offered, begun: requests so far, at this router.
            waiting: requests that wait now, at this router.
        """
        self._waiting = waiting
        if not verifiers:
            self._sums.clear()
            self._counted.clear()
            self._unknown = "no verifier is connected"
            return
        silent = [v.verifier_id for v in verifiers if v.work_s is None or v.drafting_s is None]
        self._unknown = f"{', '.join(silent)} did not report what they do" if silent else ""
        self._speculators = max(v.speculators for v in verifiers)
        self._add(sum(v.sequences for v in verifiers), self._news(verifiers), offered, begun)

    def heard(self, others: Demand) -> None:
        """What the other routers saw."""
        self._others = others

    @property
    def demand(self) -> Demand:
        """What this router saw."""
        if not self._sums:
            return Demand(waiting=self._waiting)
        first, last = self._sums[0], self._sums[-1]
        return Demand(last.offered - first.offered, last.begun - first.begun, self._waiting)

    def wanted(self, role: Role) -> float:
        """Replicas that a role should have.

        Raises:
            UnavailableError: if that is not known: nobody reported, or not for long enough, or verifiers are there and
                take none of the requests that come.
        """
        if self._unknown:
            raise UnavailableError(self._unknown)
        first, last = self._sums[0], self._sums[-1]
        elapsed_s = last.at - first.at
        if elapsed_s < _LEAST_S:
            raise UnavailableError(f"the load of {elapsed_s:.0f} s is known so far, of {_LEAST_S:.0f} s is needed")
        demand = self.demand.plus(self._others)
        match role:
            case Role.VERIFIER:
                work_s = last.work_s - first.work_s
                if not work_s and not demand.begun and (demand.offered or demand.waiting):
                    raise UnavailableError("requests come, and no verifier does anything")
                return work_s / elapsed_s * demand.unmet
            case Role.SPECULATOR:
                if not self._speculators:
                    raise UnavailableError("no speculator is attached to a verifier")
                return (last.drafting_s - first.drafting_s) / elapsed_s / _DRAFTING_SHARE
            case Role.ROUTER:
                streams = (last.stream_s - first.stream_s) / elapsed_s + demand.waiting
                return streams / self._streams_per_router

    def _news(self, verifiers: Sequence[VerifierState]) -> tuple[float, float]:
        """Work and drafting since the last look. What a verifier did before it was first seen does not count."""
        work_s = drafting_s = 0.0
        counted: dict[str, tuple[float, float]] = {}
        for v in verifiers:
            if v.work_s is None or v.drafting_s is None:
                continue
            known = self._counted.get(v.address, (v.work_s, v.drafting_s))
            if v.work_s < known[0] or v.drafting_s < known[1]:  # it started anew
                known = (0.0, 0.0)
            work_s += v.work_s - known[0]
            drafting_s += v.drafting_s - known[1]
            counted[v.address] = (v.work_s, v.drafting_s)
        self._counted = counted
        return work_s, drafting_s

    def _add(self, streams: int, news: tuple[float, float], offered: int, begun: int) -> None:
        now = self._clock()
        last = self._sums[-1] if self._sums else _Sums(now)
        sums = _Sums(
            now,
            last.work_s + news[0],
            last.drafting_s + news[1],
            last.stream_s + streams * (now - last.at),
            offered,
            begun,
        )
        self._sums.append(sums)
        while len(self._sums) > 1 and self._sums[1].at <= now - _WINDOW_S:
            self._sums.popleft()
