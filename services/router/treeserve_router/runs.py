"""The runs of one generation: usually one, two while a verifier is silent, and a new one when a verifier goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from treeserve_router.dispatcher import Dispatcher
from treeserve_router.hedging import Hedger, Run
from treeserve_router.mailbox import Draining, Ended, Lost, Mailbox, Placed, SequenceEvent, Tokens
from treeserve_router.queue import Ticket

# How soon to look for room again, where a run should go elsewhere and there was none.
_RETRY_S = 0.25


class Runs:
    """Where the tickets of a generation come from and where their events come together.

    Of two runs the first that brings tokens stays, and the other is withdrawn: nothing of it is read any more. Both
    began with the same output, and a second one begins only when all events of the first were taken. So the output is
    always that of one run continued by another, whatever the acceptance rule; under replay both say the same anyway.

    Args:
        make_ticket: a ticket that continues the output as it is now. Its arguments: where its events go, and whether
            it may not be refused because the request ran before.
    """

    def __init__(self, dispatcher: Dispatcher, hedger: Hedger, make_ticket: Callable[[Mailbox, bool], Ticket]) -> None:
        self._dispatcher = dispatcher
        self._hedger = hedger
        self._make_ticket = make_ticket
        self._filled = asyncio.Event()
        self._orders = Mailbox(self._filled)
        self._runs: list[Run] = []
        self.verifier_id = ""  # the verifier that runs it, or ran it last

    def order(self, event: SequenceEvent) -> None:
        """Tell the generation something that no verifier says."""
        self._orders.put(event)

    def submit(self, *, is_replay: bool) -> None:
        """Queue a ticket. Raises OverloadedError if the queue is full and it is no replay."""
        ticket = self._make_ticket(Mailbox(self._filled), is_replay)
        self._dispatcher.submit(ticket)
        self._runs.append(Run(ticket))

    def withdraw(self) -> None:
        """Drop all runs, wherever they are."""
        for run in tuple(self._runs):
            self._drop(run)

    async def next(self) -> list[SequenceEvent]:
        """What happened since the last call, at least one event. Meanwhile late runs are doubled, and those whose
        verifier drains are moved.
        """
        waited = False
        while True:
            self._filled.clear()
            if events := self._collect(on_time=waited):
                return events
            self._attend()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._look_at()):
                    await self._filled.wait()
            waited = True

    def _collect(self, *, on_time: bool) -> list[SequenceEvent]:
        events = self._orders.take_now()
        for run in tuple(self._runs):
            for event in run.ticket.mailbox.take_now():
                if run in self._runs and self._concerns_owner(run, event, on_time=on_time):
                    events.append(event)
        return events

    def _concerns_owner(self, run: Run, event: SequenceEvent, *, on_time: bool) -> bool:
        """Follow a run's event; whether it says something of the generation, too."""
        match event:
            case Placed(verifier_id):
                self._hedger.placed(run, verifier_id)
                if len(self._runs) == 1:
                    self.verifier_id = verifier_id
            case Tokens():
                self._hedger.heard(run, on_time=on_time)
                self._keep(run)
            case Draining():
                run.is_draining = True
                return False
            case Ended(error=None):
                self._keep(run)
            case Ended() | Lost() if len(self._runs) > 1:
                self._drop(run)  # the other goes on
                return False
            case _:
                pass
        return True

    def _keep(self, run: Run) -> None:
        """This run is the one that counts."""
        self._hedger.settled(run.ticket, won=True)
        for other in [other for other in self._runs if other is not run]:
            self._drop(other)
        if run.pulse is not None:
            self.verifier_id = run.pulse.verifier_id

    def _drop(self, run: Run) -> None:
        self._runs.remove(run)
        self._hedger.settled(run.ticket, won=False)
        self._dispatcher.withdraw(run.ticket)

    def _attend(self) -> None:
        """Run it elsewhere too if it is late, or elsewhere instead if its verifier drains."""
        if len(self._runs) != 1:
            return
        (run,) = self._runs
        if run.pulse is None or not (run.is_draining or self._hedger.late_at(run) <= self._hedger.clock()):
            return
        ticket = self._make_ticket(Mailbox(self._filled), True)
        if not run.is_draining:
            if self._hedger.hedge(run, ticket):
                self._runs.append(Run(ticket))
        elif self._hedger.move(run, ticket):
            self._drop(run)
            self._runs.append(Run(ticket))

    def _look_at(self) -> float | None:
        """When to look after a run that stays silent."""
        if len(self._runs) != 1 or self._runs[0].pulse is None:
            return None
        soon = self._hedger.clock() + _RETRY_S
        return soon if self._runs[0].is_draining else max(self._hedger.late_at(self._runs[0]), soon)
