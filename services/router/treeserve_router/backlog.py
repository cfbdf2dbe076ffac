"""What waits of one tenant and service class: what is due first goes first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from treeserve_core.sampling import ServiceClass

T = TypeVar("T")

# Of so many dispatches of a tenant, one is for what is late and has aged.
_LATE_TURN = 4


@dataclass(frozen=True, eq=False)
class Entry(Generic[T]):
    """Something that waits.

    Attributes:
        number: grows with every entry that comes.
        urgent_at: orders the entries of a tenant, together with the number; seconds on the queue's clock.
        arrived: when it came.
        due: when it is late; infinite if never.
        cost: tokens that it takes when it is dispatched, over its tenant's weight.
        is_replay: it was dispatched before.
    """

    item: T
    number: int
    urgent_at: float
    arrived: float
    due: float
    service_class: ServiceClass
    tenant: str
    cost: float
    is_replay: bool = False

    @property
    def rank(self) -> tuple[float, int]:
        """Its place among the entries of its tenant."""
        return self.urgent_at, self.number


class Backlog(Generic[T]):
    """What waits of one tenant: what can be on time by urgency, and behind it what is late.

    Once the first of what is late has aged, it has every fourth turn. What is late and has not aged is lost.
    """

    def __init__(self) -> None:
        self._on_time: list[Entry[T]] = []
        self._late: list[Entry[T]] = []
        self._turns = 0  # dispatches since the last of something late

    def __len__(self) -> int:
        return len(self._on_time) + len(self._late)

    def __getitem__(self, i: int) -> Entry[T]:
        """The i-th: those that can be on time come first."""
        return self._on_time[i] if i < len(self._on_time) else self._late[i - len(self._on_time)]

    def add(self, entry: Entry[T], *, is_late: bool = False) -> None:
        """Add an entry."""
        insort(self._late if is_late else self._on_time, entry, key=_rank)

    def remove(self, entry: Entry[T]) -> None:
        """Take an entry out that is here."""
        for entries in (self._on_time, self._late):
            i = bisect_left(entries, entry.rank, key=_rank)
            if i < len(entries) and entries[i] is entry:
                del entries[i]

    def take(self, entry: Entry[T]) -> None:
        """Take an entry out that is here, to be dispatched."""
        num_on_time = len(self._on_time)
        self.remove(entry)
        self._turns = self._turns + 1 if len(self._on_time) < num_on_time else 0

    def walk(self, aged_before: float) -> Iterator[Entry[T]]:
        """What is not lost in order of dispatch, as if each were dispatched; entries may leave meanwhile.

        Args:
            aged_before: what came at that time or before has aged.
        """
        after_on_time = after_late = (-inf, -1)
        turns = self._turns
        while True:
            on_time, late = _first_after(self._on_time, after_on_time), _first_after(self._late, after_late)
            is_aged = late is not None and late.arrived <= aged_before
            if on_time is not None and not (is_aged and turns >= _LATE_TURN - 1):
                yield on_time
                after_on_time, turns = on_time.rank, turns + 1
            elif late is not None and is_aged:
                yield late
                after_late, turns = late.rank, 0
            else:
                return

    def walk_lost(self, aged_before: float) -> Iterator[Entry[T]]:
        """What `walk` leaves out, likewise."""
        after, is_lost = (-inf, -1), False
        while (late := _first_after(self._late, after)) is not None:
            is_lost = is_lost or late.arrived > aged_before
            if is_lost:
                yield late
            after = late.rank


def _first_after(entries: list[Entry[T]], rank: tuple[float, int]) -> Entry[T] | None:
    i = bisect_right(entries, rank, key=_rank)
    return entries[i] if i < len(entries) else None


def _rank(entry: Entry[T]) -> tuple[float, int]:
    return entry.rank
