"""Who goes first among the waiting: by service level, or in order of arrival."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.backlog import Entry
from treeserve_router.fair_share import Band

T = TypeVar("T")

# A lane that is owed a dispatch; a little less than one, because shares are rounded.
_OWED = 1 - 1e-9


class Order(Protocol[T]):
    """An order of dispatch. `now` is in seconds on the queue's clock."""

    def add(self, entry: Entry[T]) -> None:
        """It waits from now on."""

    def remove(self, entry: Entry[T]) -> None:
        """It leaves without being served."""

    def take(self, entry: Entry[T], now: float) -> None:
        """It leaves to be served."""

    def charge(self, service_class: ServiceClass, tenant: str, cost: float) -> None:
        """Tokens were served, `cost` of them over the tenant's weight."""

    def walk(self, now: float) -> Iterator[Entry[T]]:
        """All that waits, in order; what it gives may leave meanwhile."""

    def victims(self, newcomer: Entry[T]) -> Iterator[Entry[T]]:
        """What may be made to leave to let a newcomer in, the least worth keeping first."""


class ArrivalOrder(Generic[T]):
    """First come, first served, whatever was promised; what ran before waits in front."""

    def __init__(self) -> None:
        self._lines: tuple[_Line[T], _Line[T]] = (_Line(), _Line())

    def add(self, entry: Entry[T]) -> None:
        """It waits from now on."""
        self._line(entry).add(entry)

    def remove(self, entry: Entry[T]) -> None:
        """It leaves without being served."""
        self._line(entry).remove(entry)

    def take(self, entry: Entry[T], now: float) -> None:
        """It leaves to be served."""
        self._line(entry).remove(entry)

    def charge(self, service_class: ServiceClass, tenant: str, cost: float) -> None:
        """Nothing: no accounts are kept."""

    def walk(self, now: float) -> Iterator[Entry[T]]:
        """All that waits, in order; what it gives may leave meanwhile."""
        for line in self._lines:
            yield from line.walk()

    def victims(self, newcomer: Entry[T]) -> Iterator[Entry[T]]:
        """None: who came first stays."""
        return iter(())

    def _line(self, entry: Entry[T]) -> _Line[T]:
        return self._lines[0 if entry.is_replay else 1]


class QosOrder(Generic[T]):
    """Classes by urgency; in a class fair shares between tenants; of a tenant the earliest deadline.

    What has become late goes behind all that has not, whatever their classes, until it has waited `ageing_s` or its
    tenant was served much less than another that waits: then it has every fourth turn of its tenant.

    Ageing: once the first of a lane has waited `ageing_s`, the lane gets its weight's share: its class's weight of
    dispatches for every weight of the most urgent lane that waits. So nothing starves, and a backlog of what waited
    long does not hold up what is urgent.

    Args:
        policies: of each class; the weights count.
    """

    def __init__(self, policies: Mapping[ServiceClass, QosPolicy] = DEFAULT_POLICIES, ageing_s: float = 10.0) -> None:
        self._ageing_s = ageing_s
        self._bands: dict[ServiceClass, Band[T]] = {c: Band() for c in sorted(ServiceClass)}
        # Two lanes a class, the most urgent first.
        self._lanes = [lane for band in self._bands.values() for lane in (band.replays, band.fresh)]
        self._weights = [policies[c].weight for c in self._bands for _ in range(2)]
        self._credit = [0.0] * len(self._lanes)  # dispatches that a lane is owed because it aged

    def add(self, entry: Entry[T]) -> None:
        """It waits from now on."""
        self._bands[entry.service_class].add(entry)

    def remove(self, entry: Entry[T]) -> None:
        """It leaves without being served."""
        self._bands[entry.service_class].remove(entry)

    def take(self, entry: Entry[T], now: float) -> None:
        """It leaves to be served."""
        aged = self._aged(now)
        self._credit = [credit if is_aged else 0.0 for credit, is_aged in zip(self._credit, aged, strict=True)]
        chosen = next(i for i, lane in enumerate(self._lanes) if entry in lane)
        in_front = (i for i, lane in enumerate(self._lanes) if any(lane.walk(now - self._ageing_s)))
        top = next(in_front, chosen)
        self._account(chosen, top, aged, self._credit)
        self._bands[entry.service_class].take(entry)

    def charge(self, service_class: ServiceClass, tenant: str, cost: float) -> None:
        """Tokens were served, `cost` of them over the tenant's weight."""
        self._bands[service_class].charge(tenant, cost)

    def walk(self, now: float) -> Iterator[Entry[T]]:
        """All that waits, in order, as if each were dispatched; what it gives may leave meanwhile."""
        for band in self._bands.values():
            band.pass_over(now)
        aged, credit, aged_before = self._aged(now), list(self._credit), now - self._ageing_s
        walks = {i: lane.walk(aged_before) for i, lane in enumerate(self._lanes) if len(lane) > 0}
        heads = {i: entry for i, walk in walks.items() if (entry := next(walk, None)) is not None}
        shown: set[Entry[T]] = set()
        while heads:
            top = min(heads)
            chosen = max(heads, key=lambda i: (credit[i] if credit[i] >= _OWED else 0.0, -i))
            shown.add(heads[chosen])
            yield heads[chosen]
            self._account(chosen, top, aged, credit)
            following = next(walks[chosen], None)
            if following is None:
                del heads[chosen]
            else:
                heads[chosen] = following
        for lane in self._lanes:
            yield from (entry for entry in lane.walk(aged_before, lost=True) if entry not in shown)

    def victims(self, newcomer: Entry[T]) -> Iterator[Entry[T]]:
        """Of less urgent classes anything; of the newcomer's own, what tenants have waiting that exceeds its tenant's.

        What ran before stays.
        """
        for service_class in sorted(ServiceClass, reverse=True):
            if service_class <= newcomer.service_class:
                break
            yield from self._bands[service_class].fresh.backwards(is_kept=lambda count: False)
        peers = self._bands[newcomer.service_class].fresh
        own = peers.count(newcomer.tenant)
        yield from peers.backwards(is_kept=lambda count: count <= own + 1)

    def _aged(self, now: float) -> list[bool]:
        return [lane.oldest + self._ageing_s <= now for lane in self._lanes]

    def _account(self, chosen: int, top: int, aged: list[bool], credit: list[float]) -> None:
        """Keep account of a dispatch from a lane while `top` is the most urgent that waits."""
        if chosen != top:
            credit[chosen] = max(credit[chosen] - 1, 0.0)
            return
        for i, is_aged in enumerate(aged):
            if is_aged and i != top:
                share = self._weights[i] / self._weights[top]
                credit[i] = min(credit[i] + share, 1 + share)


class _Line(Generic[T]):
    """Entries in order of arrival."""

    def __init__(self) -> None:
        self._entries: list[Entry[T]] = []  # sorted: numbers grow

    def add(self, entry: Entry[T]) -> None:
        self._entries.append(entry)

    def remove(self, entry: Entry[T]) -> None:
        i = bisect_left(self._entries, entry.number, key=_number)
        if i < len(self._entries) and self._entries[i] is entry:
            del self._entries[i]

    def walk(self) -> Iterator[Entry[T]]:
        number = -1
        while (i := bisect_right(self._entries, number, key=_number)) < len(self._entries):
            entry = self._entries[i]
            number = entry.number
            yield entry


def _number(entry: Entry[T]) -> int:
    return entry.number
