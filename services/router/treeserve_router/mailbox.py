"""What happens to a sequence on its way, and the box in which its owner finds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats


@dataclass(frozen=True)
class Placed:
    """A verifier has it now."""

    verifier_id: str


@dataclass(frozen=True)
class Tokens:
    """New output tokens, `offset` the output position of the first. log_probs is empty or has one entry per token."""

    offset: int
    token_ids: tuple[int, ...]
    log_probs: tuple[PositionLogProbs, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The verifier ended it: with a reason, or with an error."""

    reason: FinishReason | None
    stats: SpeculationStats | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Lost:
    """The link to its verifier broke: nothing more will come from there."""

    verifier_id: str
    why: str


@dataclass(frozen=True)
class Stranded:
    """It waited as long as is allowed while no verifier could ever serve it."""


@dataclass(frozen=True)
class Superseded:
    """A newer call with the same request id took over."""


SequenceEvent = Placed | Tokens | Ended | Lost | Stranded | Superseded


class Mailbox:
    """Events of one sequence: put by whoever runs it, taken in order by the one who owns it.

    Never blocks the one who puts, so a slow client holds up nobody else; what gathers here is bounded by the request's
    max_tokens.
    """

    def __init__(self) -> None:
        self._events: list[SequenceEvent] = []
        self._filled = asyncio.Event()

    def put(self, event: SequenceEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._filled.set()

    async def take(self) -> list[SequenceEvent]:
        """All events so far, at least one, oldest first."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        return events
