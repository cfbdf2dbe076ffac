"""The waiting of one service class, tenant by tenant: the least served goes first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

from treeserve_router.backlog import Backlog, Entry

T = TypeVar("T")

# How far the counter of a tenant with nothing but late requests may fall behind, in tokens over its weight.
_MOST_BEHIND = 2048.0

# Counters of tenants that are owed nothing are forgotten when there are more than this many.
_MIN_SWEEP = 1024


class Lane(Generic[T]):
    """Backlogs by tenant. What a tenant has been served is told to the lane, which keeps the tenants in that order."""

    def __init__(self) -> None:
        self._arrivals: dict[Entry[T], None] = {}  # the first came first
        self._backlogs: dict[str, Backlog[T]] = {}
        self._served: dict[str, float] = {}  # of tenants with a backlog
        self._turns: list[tuple[float, str]] = []  # the same, sorted

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, entry: Entry[T]) -> bool:
        return entry in self._arrivals

    def __getitem__(self, tenant: str) -> Backlog[T]:
        """The backlog of a tenant that has one."""
        return self._backlogs[tenant]

    def add(self, entry: Entry[T], served: float) -> None:
        """Add an entry of a tenant that has been served this much."""
        self._arrivals[entry] = None
        backlog = self._backlogs.setdefault(entry.tenant, Backlog())
        backlog.add(entry)
        if len(backlog) == 1:
            self._served[entry.tenant] = served
            insort(self._turns, (served, entry.tenant))

    def remove(self, entry: Entry[T]) -> None:
        """Take an entry out that is here."""
        self._leave(entry, Backlog.remove)

    def take(self, entry: Entry[T]) -> None:
        """Take an entry out that is here, to be dispatched."""
        self._leave(entry, Backlog.take)

    def charged(self, tenant: str, served: float) -> None:
        """A tenant has been served this much by now."""
        if tenant in self._backlogs:
            self._leave_turn(tenant)
            self._served[tenant] = served
            insort(self._turns, (served, tenant))

    def walk(self, aged_before: float, *, lost: bool = False) -> Iterator[Entry[T]]:
        """Entries in order, as if each were dispatched. Entries may leave and tenants be charged meanwhile; what comes
        meanwhile may be missed.

        Of a tenant that was served much less than another one that waits, whatever is late counts as aged.

        Args:
            aged_before: what came at that time or before has aged.
            lost: walk what is late and has not aged, and nothing else; by default all else.
        """
        behind = self._turns[-1][0] - _MOST_BEHIND if self._turns else -inf
        again: list[tuple[float, str, Iterator[Entry[T]]]] = []  # tenants that had a turn, and what is left of them
        seen: set[str] = set()
        last = (-inf, "")
        while True:
            turn = self._turn_after(last, seen)
            if again and (turn is None or again[0][:2] < turn):
                served, tenant, entries = heappop(again)
            elif turn is not None:
                last, (served, tenant) = turn, turn
                backlog, aged = self._backlogs[tenant], inf if served <= behind else aged_before
                entries = backlog.walk_lost(aged) if lost else backlog.walk(aged)
                seen.add(tenant)
            else:
                return
            entry = next(entries, None)
            if entry is not None:
                yield entry
                heappush(again, (served + entry.cost, tenant, entries))

    def backwards(self, is_kept: Callable[[int], bool]) -> Iterator[Entry[T]]:
        """What would make room: of the tenant with the most entries the last one, and so on.

        Args:
            is_kept: whether a tenant with this many entries keeps them.
        """
        crowds = [(-len(backlog), tenant) for tenant, backlog in self._backlogs.items()]
        heapify(crowds)
        while crowds and not is_kept(-crowds[0][0]):
            size, tenant = heappop(crowds)
            yield self._backlogs[tenant][-size - 1]
            if size < -1:
                heappush(crowds, (size + 1, tenant))

    def count(self, tenant: str) -> int:
        """Entries of a tenant."""
        return len(self._backlogs[tenant]) if tenant in self._backlogs else 0

    @property
    def least_served(self) -> float:
        """What the tenant whose turn it is has been served; infinite if the lane is empty."""
        return self._turns[0][0] if self._turns else inf

    @property
    def oldest(self) -> float:
        """When the first of the entries came; infinite if the lane is empty."""
        return next(iter(self._arrivals)).arrived if self._arrivals else inf

    def _leave(self, entry: Entry[T], leave: Callable[[Backlog[T], Entry[T]], None]) -> None:
        del self._arrivals[entry]
        backlog = self._backlogs[entry.tenant]
        leave(backlog, entry)
        if not backlog:
            del self._backlogs[entry.tenant]
            self._leave_turn(entry.tenant)

    def _turn_after(self, last: tuple[float, str], seen: set[str]) -> tuple[float, str] | None:
        i = bisect_right(self._turns, last)
        while i < len(self._turns) and self._turns[i][1] in seen:
            i += 1
        return self._turns[i] if i < len(self._turns) else None

    def _leave_turn(self, tenant: str) -> None:
        del self._turns[bisect_left(self._turns, (self._served.pop(tenant), tenant))]


class Band(Generic[T]):
    """The entries of one service class, and what each tenant has been served in it.

    Fair shares by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024): a tenant's
    counter grows by every token it is served, over its weight, and the lowest goes first. Who comes back after a pause
    is lifted to the lowest of those who wait: nobody saves up.

    Attributes:
        replays: what ran before; it goes first.
        fresh: all else.
    """

    def __init__(self) -> None:
        self.replays: Lane[T] = Lane()
        self.fresh: Lane[T] = Lane()
        self._by_due: list[Entry[T]] = []  # what can still be late
        self._served: dict[str, float] = {}
        self._floor = 0.0
        self._sweep_at = _MIN_SWEEP

    def add(self, entry: Entry[T]) -> None:
        """Add an entry."""
        tenant = entry.tenant
        self._raise_floor()
        if not self.replays.count(tenant) and not self.fresh.count(tenant):
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._lane(entry).add(entry, self._served[tenant])
        if entry.due < inf and not entry.is_replay:  # what ran before stays in front
            insort(self._by_due, entry, key=_due)

    def remove(self, entry: Entry[T]) -> None:
        """Take an entry out that is here."""
        self._forget_due(entry)
        self._lane(entry).remove(entry)

    def take(self, entry: Entry[T]) -> None:
        """Take an entry out that is here, to be dispatched: its tenant is charged with its cost."""
        self._raise_floor()
        self._forget_due(entry)
        self._lane(entry).take(entry)
        self.charge(entry.tenant, entry.cost)

    def charge(self, tenant: str, cost: float) -> None:
        """A tenant was served `cost` tokens over its weight."""
        served = self._served[tenant] = self._served.get(tenant, self._floor) + cost
        self.replays.charged(tenant, served)
        self.fresh.charged(tenant, served)
        if len(self._served) > self._sweep_at:
            self._forget_even()

    def pass_over(self, now: float) -> None:
        """Put what has become late behind what can still be on time."""
        while self._by_due and self._by_due[0].due <= now:
            entry = self._by_due.pop(0)
            backlog = self._lane(entry)[entry.tenant]
            backlog.remove(entry)
            backlog.add(entry, is_late=True)

    def _lane(self, entry: Entry[T]) -> Lane[T]:
        return self.replays if entry.is_replay else self.fresh

    def _forget_due(self, entry: Entry[T]) -> None:
        i = bisect_left(self._by_due, _due(entry), key=_due)
        if i < len(self._by_due) and self._by_due[i] is entry:
            del self._by_due[i]

    def _raise_floor(self) -> None:
        """Follow the least served of those who wait."""
        least = min(self.replays.least_served, self.fresh.least_served)
        if least < inf:
            self._floor = max(self._floor, least)

    def _forget_even(self) -> None:
        """Drop the counters that say no more than the floor does."""
        self._served = {
            tenant: served
            for tenant, served in self._served.items()
            if served > self._floor or self.replays.count(tenant) or self.fresh.count(tenant)
        }
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._served))


def _due(entry: Entry[T]) -> tuple[float, int]:
    return entry.due, entry.number
