"""What happens to a sequence on its way, and the box in which its owner finds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from treeserve_core.errors import OverloadedError
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
class Draining:
    """Its verifier is about to go: it still runs there, and is better run elsewhere."""


@dataclass(frozen=True)
class Ended:
    """The verifier ended it: with a reason, or with an error. It had held the KV of `cached_tokens` of the prompt."""

    reason: FinishReason | None
    stats: SpeculationStats | None = None
    error: Exception | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Lost:
    """The link to its verifier broke: nothing more will come from there."""

    verifier_id: str
    why: str


@dataclass(frozen=True)
class Stranded:
    """It waited as long as is allowed while no verifier could ever serve it."""


@dataclass(frozen=True)
class Shed:
    """It may wait no longer: its target cannot be met any more, or others have more of a claim to the queue."""

    error: OverloadedError


@dataclass(frozen=True)
class Superseded:
    """A newer call with the same request id took over."""


@dataclass(frozen=True)
class Interrupted:
    """This router ends it; its client may resume it at another."""

    why: str


SequenceEvent = Placed | Tokens | Draining | Ended | Lost | Stranded | Shed | Superseded | Interrupted


class Mailbox:
    """Events of one sequence: put by whoever runs it, taken in order by the one who owns it.

    Never blocks the one who puts, so a slow client holds up nobody else; what gathers here is bounded by the request's
    max_tokens.

    Args:
        filled: set whenever an event is put; one that several boxes share tells their owner of all of them.
    """

    def __init__(self, filled: asyncio.Event | None = None) -> None:
        self._events: list[SequenceEvent] = []
        self._filled = asyncio.Event() if filled is None else filled

    def put(self, event: SequenceEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._filled.set()

    def take_now(self) -> list[SequenceEvent]:
        """All events so far, oldest first."""
        events, self._events = self._events, []
        return events

    async def take(self) -> list[SequenceEvent]:
        """All events so far, at least one, oldest first."""
        await self._filled.wait()
        self._filled.clear()
        return self.take_now()
