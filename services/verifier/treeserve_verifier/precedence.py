"""Who comes first: by class and ageing, then by when the next token is due; and whom one may pause."""

from __future__ import annotations

from collections.abc import Iterable

from treeserve_verifier.sequence import Sequence

_LOST = 2  # classes that a missed TTFT target costs
_UNPROMISED = 4.0  # who was promised no time is due after so many times what lifts a sequence by one class


class Ranking:
    """Orders sequences at a time.

    Args:
        ageing_s: every time a sequence has waited so long here, however often, it is as urgent as one class above: so
            nobody starves.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def level(self, sequence: Sequence, now: float) -> int:
        """Its class, less its age; 1 is that of a fresh realtime sequence."""
        return sequence.submission.limits.service_class - int(sequence.wait.so_far(now) / self._ageing_s)

    def precedence(self, sequence: Sequence, now: float) -> tuple[int, bool, float, int]:
        """Smaller is more urgent: by level, then by when the next token is due.

        Those that cannot meet their time to the first token any more fall two levels, and come after those there that
        can: the time is worth more to who can still use it.
        """
        promise, due = sequence.promise, sequence.promise.due_at
        if due is None:
            due = promise.asked_at + _UNPROMISED * self._ageing_s
        return self.standing(sequence, now), self.is_late(sequence, now), due, sequence.seq_id

    def standing(self, sequence: Sequence, now: float) -> int:
        """Its level, and two more if it is late."""
        return self.level(sequence, now) + _LOST * self.is_late(sequence, now)

    def is_late(self, sequence: Sequence, now: float) -> bool:
        """Whether it cannot meet its time to the first token any more."""
        due = sequence.promise.due_at
        return due is not None and sequence.promise.first_at is None and due < now

    def in_order(self, sequences: Iterable[Sequence], now: float) -> list[Sequence]:
        """The most urgent first."""
        return sorted(sequences, key=lambda s: self.precedence(s, now))

    def pausable(self, running: Iterable[Sequence], now: float) -> list[tuple[int, Sequence]]:
        """Those that one of a smaller standing may pause, with their standings, the least urgent first.

        Besides those that are preemptible, any that is late: a place is worth more to who can still be on time.
        """
        found = self.in_order((s for s in running if s.submission.limits.preemptible or self.is_late(s, now)), now)
        return [(self.standing(s, now), s) for s in reversed(found)]
