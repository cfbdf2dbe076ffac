"""Moves tickets from the queue to verifiers as places become free, and gives up on those nobody can serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from treeserve_router.mailbox import Stranded
from treeserve_router.placement import place
from treeserve_router.pool import VerifierPool
from treeserve_router.queue import RequestQueue, Ticket
from treeserve_router.verifier_link import VerifierLink


class Dispatcher:
    """Owns every ticket from its submission until it ends or is withdrawn.

    Args:
        verifier_wait_s: longest time a ticket waits while no connected verifier could ever serve it.
        clock: seconds, monotonic; the event loop's own.
    """

    def __init__(
        self, queue: RequestQueue, pool: VerifierPool, verifier_wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._verifier_wait_s = verifier_wait_s
        self._clock = clock
        self._running: dict[Ticket, VerifierLink] = {}
        self._give_up_at: dict[Ticket, float] = {}  # tickets that no verifier can serve, the longest stranded first
        self._wake = asyncio.Event()
        pool.subscribe(self._wake.set)

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; from now on its mailbox tells what happens to it.

        Raises:
            OverloadedError: if the queue is full.
        """
        self._queue.put(ticket)
        self._wake.set()

    def withdraw(self, ticket: Ticket) -> None:
        """Drop a ticket wherever it is; nothing happens if it has ended."""
        self._give_up_at.pop(ticket, None)
        if not self._queue.remove(ticket) and (link := self._running.pop(ticket, None)) is not None:
            link.cancel(ticket)
        self._wake.set()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next(iter(self._give_up_at.values()), None)):
                    await self._wake.wait()
            self._wake.clear()
            self._dispatch()
            self._give_up()

    def _dispatch(self) -> None:
        """Place tickets in order until one has to wait for room: nobody overtakes it."""
        states = {state.address: state for state in self._pool.states()}
        for ticket in self._queue.in_order():
            if not any(state.can_serve(ticket) for state in states.values()):
                self._give_up_at.setdefault(ticket, self._clock() + self._verifier_wait_s)
                continue
            self._give_up_at.pop(ticket, None)
            chosen = place(ticket, states.values())
            if chosen is None:
                break
            self._queue.remove(ticket)
            link = self._pool.link(chosen.address)
            self._running[ticket] = link
            link.submit(ticket)
            if link.state is not None:
                states[chosen.address] = link.state

    def _give_up(self) -> None:
        now = self._clock()
        states = self._pool.states()
        for ticket in [ticket for ticket, when in self._give_up_at.items() if when <= now]:
            del self._give_up_at[ticket]
            if not any(state.can_serve(ticket) for state in states) and self._queue.remove(ticket):
                ticket.mailbox.put(Stranded())
