"""The load generator: sends requests when they are due, whatever became of those before, and notes what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from benchmarks.slo.trace import Arrival
from treeserve_client import Chunk, ResourceExhausted, TreeserveClientError

Outcome = Literal["finished", "shed", "failed", "unfinished"]

# Whoever is refused in a closed loop would ask again at once, forever.
_PAUSE_AFTER_REFUSAL_S = 0.1


class TokenStream(Protocol):
    """What a client's stream has to offer: an iterator over chunks that ends, and can be ended."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks."""

    def close(self) -> None:
        """Cancel what still runs."""


Submit = Callable[[Arrival], TokenStream]


@dataclass(frozen=True)
class Record:
    """One request as its client saw it. Times are seconds since the trace began.

    Attributes:
        outcome: "shed" was refused with RESOURCE_EXHAUSTED, "failed" with anything else, "unfinished" still ran when
            the run was over.
        chunks: when tokens came, and how many.
    """

    arrival: Arrival
    outcome: Outcome
    chunks: tuple[tuple[float, int], ...] = ()
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    error: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """From the moment at which it was due to the first token; None without one.

        Counted from then and not from when it was sent: a late generator must not look like a fast server.
        """
        return 1e3 * (self.chunks[0][0] - self.arrival.at_s) if self.chunks else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token after the first; None with fewer than two."""
        if self.tokens < 2:
            return None
        return 1e3 * (self.chunks[-1][0] - self.chunks[0][0]) / (self.tokens - 1)

    @property
    def tokens(self) -> int:
        """Output tokens that came."""
        return sum(count for _, count in self.chunks)

    def tokens_between(self, from_s: float, to_s: float) -> int:
        """Output tokens that came at a time in [from_s, to_s)."""
        return sum(count for at_s, count in self.chunks if from_s <= at_s < to_s)

    def line(self) -> dict[str, Any]:
        """It as a line of a results file: the line of the trace and what became of it."""
        return self.arrival.line() | {
            "outcome": self.outcome,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tokens": self.tokens,
            "error": self.error,
        }


async def run_trace(arrivals: Sequence[Arrival], submit: Submit, ends_s: float) -> list[Record]:
    """Send each request when it is due (open loop); what still runs `ends_s` seconds after the start is cancelled."""
    now = asyncio.get_running_loop().time
    began = now()

    async def send(arrival: Arrival) -> Record:
        await asyncio.sleep(began + arrival.at_s - now())
        return await observe(arrival, submit, began, ends_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(arrival)) for arrival in arrivals]
    return [task.result() for task in tasks]


async def keep_busy(
    requests: Iterator[Arrival], concurrency: int, submit: Submit, began: float, ends_s: float
) -> list[Record]:
    """Keep so many requests in flight (closed loop) until `ends_s` seconds after `began`, or until there are no more.

    Each record's arrival has the time at which it was sent.

    Args:
        began: the event loop's time from which seconds are counted.
    """
    now = asyncio.get_running_loop().time
    records: list[Record] = []

    async def work() -> None:
        for request in requests:
            if now() - began >= ends_s:
                return
            record = await observe(_sent_at(request, now() - began), submit, began, ends_s)
            records.append(record)
            if record.outcome in ("shed", "failed"):
                await asyncio.sleep(_PAUSE_AFTER_REFUSAL_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return records


async def observe(arrival: Arrival, submit: Submit, began: float, ends_s: float) -> Record:
    """Send one request and follow it to its end, or until `ends_s`."""
    now = asyncio.get_running_loop().time
    chunks: list[tuple[float, int]] = []
    token_ids: list[int] = []
    outcome: Outcome = "finished"
    error = ""
    stream: TokenStream | None = None
    try:
        async with asyncio.timeout_at(began + ends_s):
            stream = submit(arrival)
            async for chunk in stream:
                if chunk.token_ids:
                    chunks.append((now() - began, len(chunk.token_ids)))
                    token_ids += chunk.token_ids
    except TimeoutError:
        outcome = "unfinished"
    except ResourceExhausted as refusal:
        outcome, error = "shed", str(refusal)
    except TreeserveClientError as failure:
        outcome, error = "failed", f"{type(failure).__name__}: {failure}"
    finally:
        if stream is not None:
            stream.close()
    return Record(arrival, outcome, tuple(chunks), tuple(token_ids), error)


def _sent_at(request: Arrival, at_s: float) -> Arrival:
    return replace(request, at_s=at_s)
