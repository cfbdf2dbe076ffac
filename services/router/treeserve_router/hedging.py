"""When a silent verifier counts as stalled, and how many sequences may run twice because of that."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from treeserve_router.dispatcher import Dispatcher
from treeserve_router.metrics import RouterMetrics
from treeserve_router.queue import Ticket

# Silence this many times longer than what lies between tokens at present is unusual.
_UNUSUAL_GAPS = 8.0
# A verifier that lives may have paused a sequence, or let it wait for its place: that is given this many times longer.
_STARVED = 5.0
# Before the first token there is a prefill; slow engines take as long for a token of it.
_PREFILL_S_PER_TOKEN = 0.002
_SMOOTHING = 0.2


@dataclass(eq=False)
class Pulse:
    """What all runs on one verifier say of it.

    Attributes:
        heard_at: when any of them brought tokens last.
        gap_s: time between tokens of one run, smoothed over all; 0 before the first.
    """

    verifier_id: str
    heard_at: float
    gap_s: float = 0.0


@dataclass(eq=False)
class Run:
    """One try of a request.

    Attributes:
        pulse: of the verifier that has it; None while it waits for one.
        heard_at: when it was placed, then when it brought tokens last.
        gap_s: time between its tokens, smoothed.
        has_tokens: it brought some.
        is_draining: its verifier is about to go.
    """

    ticket: Ticket
    pulse: Pulse | None = None
    heard_at: float = 0.0
    gap_s: float = 0.0
    has_tokens: bool = False
    is_draining: bool = False


class Hedger:
    """Shared by all generations of a router: how fast verifiers answer, and which runs are doubled now.

    Args:
        stall_timeout_s: least silence of a verifier after which it has to show that it lives.
        max_hedges: runs that may be doubled at once; 0 doubles none.
        clock: seconds, monotonic; the event loop's own.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        stall_timeout_s: float,
        max_hedges: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._stall_timeout_s = stall_timeout_s
        self._max_hedges = max_hedges
        self._hedges: set[Ticket] = set()
        # A pulse lives as long as any run on its verifier.
        self._pulses: weakref.WeakValueDictionary[str, Pulse] = weakref.WeakValueDictionary()

    def placed(self, run: Run, verifier_id: str) -> None:
        """A verifier has the run now."""
        run.heard_at = self.clock()
        run.pulse = self._pulses.setdefault(verifier_id, Pulse(verifier_id, run.heard_at))

    def heard(self, run: Run, *, on_time: bool) -> None:
        """A run brought tokens. If its owner was there when they came (`on_time`), they tell its pace."""
        now = self.clock()
        if on_time and run.has_tokens:
            gap_s = min(now - run.heard_at, self._stall_timeout_s)  # what is longer is no pace, but a stall
            run.gap_s = _smoothed(run.gap_s, gap_s)
            if run.pulse is not None:
                run.pulse.gap_s = _smoothed(run.pulse.gap_s, gap_s)
        run.heard_at, run.has_tokens = now, True
        if run.pulse is not None:
            run.pulse.heard_at = now

    def late_at(self, run: Run) -> float:
        """When a placed run that stays silent counts as late; infinite before it is placed."""
        if run.pulse is None:
            return float("inf")
        return min(self._stalled_at(run, run.pulse), self._starved_at(run, run.pulse))

    def hedge(self, late: Run, ticket: Ticket) -> bool:
        """Run another ticket of a late run's request elsewhere.

        False if that is to be tried again soon: its verifier may still show that it lives, none has room, or too many
        are doubled.
        """
        if late.pulse is None:
            return False
        if self.clock() < self._starved_at(late, late.pulse) and not self._dispatcher.suspect(late.ticket):
            return False  # it was asked for a sign of life only now
        if len(self._hedges) >= self._max_hedges or not self._dispatcher.place_now(ticket, late.pulse.verifier_id):
            return False
        self._hedges.add(ticket)
        self._metrics.hedges.labels("started").inc()
        return True

    def move(self, run: Run, ticket: Ticket) -> bool:
        """Place another ticket of a run's request elsewhere; False if there is no room."""
        if run.pulse is None or not self._dispatcher.place_now(ticket, run.pulse.verifier_id):
            return False
        self._metrics.moves.inc()
        return True

    def settled(self, ticket: Ticket, *, won: bool) -> None:
        """A run stays alone or is gone; nothing happens if it was no hedge."""
        if ticket in self._hedges:
            self._hedges.remove(ticket)
            self._metrics.hedges.labels("won" if won else "lost").inc()

    def _stalled_at(self, run: Run, pulse: Pulse) -> float:
        return max(run.heard_at, pulse.heard_at) + self._patience_s(run, pulse)

    def _starved_at(self, run: Run, pulse: Pulse) -> float:
        return run.heard_at + _STARVED * self._patience_s(run, pulse)

    def _patience_s(self, run: Run, pulse: Pulse) -> float:
        patience_s = max(self._stall_timeout_s, _UNUSUAL_GAPS * max(run.gap_s, pulse.gap_s))
        return patience_s if run.has_tokens else patience_s + _PREFILL_S_PER_TOKEN * run.ticket.num_tokens


def _smoothed(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old) if old else new
