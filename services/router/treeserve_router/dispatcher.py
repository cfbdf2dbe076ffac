"""Moves tickets from the queue to verifiers as places become free, and gives up on those nobody can serve (in time)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from treeserve_core.errors import OverloadedError
from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.batcher import Batcher
from treeserve_router.dispatch_round import DispatchRound, Reach, covers, reach_of
from treeserve_router.explain import NO_DECISIONS, DecisionKind, DecisionLog
from treeserve_router.feasibility import Feasibility
from treeserve_router.mailbox import Shed, Stranded
from treeserve_router.placement import VerifierState, place, rank
from treeserve_router.queue import RequestQueue, Ticket


class Link(Protocol):
    """The way to one verifier."""

    @property
    def state(self) -> VerifierState | None:
        """What placement may know of the verifier; None while it is not connected."""

    def submit(self, ticket: Ticket, waited_s: float = 0.0) -> None:
        """Run a ticket's sequence; its mailbox tells what happens. `waited_s` is gone of its time already."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket's sequence, if it still runs."""

    def suspect(self) -> bool:
        """Ask the verifier for a sign of life and avoid it until one comes; whether it was asked before."""


class Verifiers(Protocol):
    """The verifiers that tickets can go to."""

    def states(self) -> Sequence[VerifierState]:
        """Those that are connected."""

    def link(self, address: str) -> Link:
        """The way to one of them."""

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever their states change."""


class Dispatcher:
    """Owns every ticket from its submission until it ends or is withdrawn.

    Args:
        verifier_wait_s: longest time a ticket waits while no connected verifier could ever serve it.
        clock: seconds, monotonic; the event loop's own if `run` is used.
        policies: which classes reserve places and which may be refused; a class without a policy does neither.
        decisions: where every decision is noted.

    Attributes:
        offered, begun: requests that were submitted, refused ones included, and those of them that went to a verifier.
            Replays count as neither.
    """

    def __init__(
        self,
        queue: RequestQueue,
        pool: Verifiers,
        verifier_wait_s: float,
        clock: Callable[[], float],
        *,
        policies: Mapping[ServiceClass, QosPolicy] = DEFAULT_POLICIES,
        decisions: DecisionLog = NO_DECISIONS,
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._verifier_wait_s = verifier_wait_s
        self._clock = clock
        self._batcher = Batcher(policies)
        self._feasibility = Feasibility(policies, clock)
        self._decisions = decisions
        self._running: dict[Ticket, Link] = {}
        self._reach: Reach = {}
        self._give_up_at: dict[Ticket, float] = {}  # tickets that no verifier can serve, the longest stranded first
        # When a ticket last found no room, which one, and why.
        self._blocked: tuple[float, Ticket | None, str] = (float("-inf"), None, "")
        self._wake = asyncio.Event()
        self.offered = 0
        self.begun = 0
        pool.subscribe(self._wake.set)

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; from now on its mailbox tells what happens to it.

        Raises:
            OverloadedError: if the queue is full, or its target for the first token cannot be met.
        """
        self.offered += not ticket.is_replay
        states = self._pool.states()
        self._note_reach(states)
        try:
            self._feasibility.check(ticket, states)
            displaced = self._queue.put(ticket)
        except OverloadedError as error:
            self._left(ticket)
            self._decisions.note(ticket.request, DecisionKind.REFUSED, str(error))
            raise
        self._feasibility.queued(ticket, states)
        if not covers(self._reach, ticket):
            self._give_up_at[ticket] = self._clock() + self._verifier_wait_s
        self._note_queued(ticket)
        for other, refusal in displaced:
            self._shed(other, refusal)
        self._wake.set()

    def withdraw(self, ticket: Ticket) -> None:
        """Drop a ticket wherever it is; nothing happens if it has ended."""
        self._queue.remove(ticket)
        self._left(ticket)
        if (link := self._running.pop(ticket, None)) is not None:
            link.cancel(ticket)
        self._wake.set()

    def place_now(self, ticket: Ticket, avoiding: str) -> bool:
        """Run a ticket on another verifier than `avoiding` (its id) at once; False, and nothing happens, if none has
        room.

        It has been running, so it goes before all that wait in the queue, but not to places that are kept for more
        urgent classes.
        """
        others = [state for state in self._pool.states() if state.verifier_id != avoiding]
        chosen = place(ticket, others, partial(self._batcher.has_room, ticket))
        if chosen is not None:
            self._decisions.note(ticket.request, DecisionKind.HEDGED, f"instead of {avoiding}", chosen.verifier_id)
            self._send(ticket, chosen, waited_s=0.0)
        return chosen is not None

    def suspect(self, ticket: Ticket) -> bool:
        """Ask the verifier of a running ticket for a sign of life: it gets nothing more until it is heard again.

        Returns whether it owes one already since an earlier call.
        """
        link = self._running.get(ticket)
        return link is not None and link.suspect()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        again_at: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(again_at):
                    await self._wake.wait()
            self._wake.clear()
            again_at = self.dispatch()

    def dispatch(self) -> float | None:
        """Place what can be placed, refuse what is too late, and give up on what nobody can serve.

        Returns when to call again at the latest, on the clock; None if a change alone makes that necessary.
        """
        states = self._pool.states()
        self._note_reach(states)
        self._shed_late(states)
        self._place_waiting(states)
        self._feasibility.looked()
        self._give_up()
        times = (next(iter(self._give_up_at.values()), None), self._feasibility.next_look)
        return min((time for time in times if time is not None), default=None)

    def _place_waiting(self, states: Iterable[VerifierState]) -> None:
        """Go through the queue until nothing more can be placed.

        A ticket that waits for room at some verifiers is not overtaken there, but for what `Batcher.passes` lets pass.
        Each ticket is looked at once, and the verifiers only for those that are placed or are the first to wait.
        """
        unseen = {c: self._queue.depth(c) for c in ServiceClass}
        if not any(unseen.values()):
            return
        dispatch_round = DispatchRound(self._batcher, states)
        for ticket in self._queue.in_order():
            if all(dispatch_round.is_over_for(c) for c, tickets in unseen.items() if tickets > 0):
                break
            unseen[ticket.request.limits.service_class] -= 1
            fitting = dispatch_round.open_to(ticket)
            if not fitting:
                continue
            chosen = place(ticket, fitting, partial(self._batcher.has_room, ticket))
            if chosen is None:
                dispatch_round.block(ticket, fitting)
                self._note_blocked(ticket, fitting)
                continue
            self._note_placed(ticket, fitting)
            waited_s = self._feasibility.waited_s(ticket)
            self._queue.take(ticket)
            self._feasibility.placed(ticket)
            self.begun += not ticket.is_replay
            self._send(ticket, chosen, waited_s)
            dispatch_round.changed(chosen.address, self._pool.link(chosen.address).state)

    def _send(self, ticket: Ticket, chosen: VerifierState, waited_s: float) -> None:
        link = self._running[ticket] = self._pool.link(chosen.address)
        link.submit(ticket, waited_s)

    def _shed_late(self, states: Iterable[VerifierState]) -> None:
        for ticket, refusal in self._feasibility.take_late(states):
            if self._queue.remove(ticket):
                self._shed(ticket, refusal)

    def _shed(self, ticket: Ticket, refusal: OverloadedError) -> None:
        """Tell a ticket that left the queue why it may wait no longer."""
        self._left(ticket)
        self._decisions.note(ticket.request, DecisionKind.REFUSED, str(refusal))
        ticket.mailbox.put(Shed(refusal))

    def _note_reach(self, states: Iterable[VerifierState]) -> None:
        """Find out who is stranded, whenever that may have changed."""
        reach = reach_of(states)
        if reach == self._reach:
            return
        self._reach = reach
        for ticket in self._queue.in_order():
            if covers(reach, ticket):
                self._give_up_at.pop(ticket, None)
            else:
                self._give_up_at.setdefault(ticket, self._clock() + self._verifier_wait_s)

    def _give_up(self) -> None:
        now = self._clock()
        while self._give_up_at and next(iter(self._give_up_at.values())) <= now:
            ticket = next(iter(self._give_up_at))
            self._left(ticket)
            if self._queue.remove(ticket):
                ticket.mailbox.put(Stranded())

    def _left(self, ticket: Ticket) -> None:
        """A ticket does not wait any more; nothing happens if it did not. The queue, too, makes tickets leave."""
        self._give_up_at.pop(ticket, None)
        self._feasibility.left(ticket)

    def _note_queued(self, ticket: Ticket) -> None:
        if self._decisions.is_on:
            limits = ticket.request.limits
            before = sum(self._queue.depth(c) for c in ServiceClass if c <= limits.service_class) - 1
            stranded = "; no verifier can serve it" if ticket in self._give_up_at else ""
            reason = f"{ticket.num_tokens} tokens; {before} as urgent requests wait{stranded}"
            self._decisions.note(ticket.request, DecisionKind.QUEUED, reason)

    def _note_blocked(self, ticket: Ticket, fitting: Iterable[VerifierState]) -> None:
        if self._decisions.is_on:
            obstacles = Counter(self._batcher.obstacle(ticket, state) for state in fitting)
            reason = ", ".join(f"{count} verifier(s) with {what}" for what, count in obstacles.most_common())
            self._blocked = (self._clock(), ticket, reason)
            self._decisions.note(ticket.request, DecisionKind.BLOCKED, reason)

    def _note_placed(self, ticket: Ticket, fitting: Iterable[VerifierState]) -> None:
        if self._decisions.is_on:
            free = [state for state in fitting if self._batcher.has_room(ticket, state)]
            (best, cost), *others = rank(ticket, free)
            waited_s = self._feasibility.waited_s(ticket)
            reason = f"after {waited_s:.3f} s"
            blocked_at, blocked, why = self._blocked
            if blocked is not ticket and blocked_at > self._clock() - waited_s:
                reason += f" behind a request that found {why}"
            if others:
                reason += f"; {others[0][0].verifier_id} would cost {others[0][1].total_s:.3f} s"
            self._decisions.note(ticket.request, DecisionKind.PLACED, reason, best.verifier_id, cost)
