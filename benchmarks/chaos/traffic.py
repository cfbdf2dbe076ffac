"""Streams the requests of a run and writes down when each token came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.chaos.workload import Case
from treeserve_client import AsyncClient, Completion, GenerateParams, TreeserveClientError

HUNG_AFTER_S = 60.0
# A verifier that drains lets go of its sequences a little later, one that is stopped is noticed a little later.
SOON_S = 5.0


@dataclass
class Trace:
    """One request as its client saw it. Times are on the monotonic clock.

    Attributes:
        token_ids: those that came, whatever their offsets said.
        arrivals: when each chunk came.
        repeated, skipped: tokens that the offsets say came twice, or never.
        completion: None if it failed or hung.
        error: why it failed; empty if it did not.
    """

    case: Case
    began: float = 0.0
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    repeated: int = 0
    skipped: int = 0
    completion: Completion | None = None
    error: str = ""
    hung: bool = False

    def silence_s(self, disturbed_at: float) -> float | None:
        """Longest time without tokens that began with a disturbance or soon after; None if it did not run then."""
        if not self.began <= disturbed_at < self.ended:
            return None
        moments = [disturbed_at, *(at for at in self.arrivals if at > disturbed_at), self.ended]
        return max(after - at for at, after in pairwise(moments) if at <= disturbed_at + SOON_S)


async def follow(client: AsyncClient, trace: Trace, *, speculation: bool = True) -> None:
    """Run one request to its end, or until it counts as hung."""
    trace.began = time.monotonic()
    try:
        async with asyncio.timeout(HUNG_AFTER_S):
            await _collect(client, trace, speculation=speculation)
    except TimeoutError:
        trace.hung = True
    except TreeserveClientError as error:
        trace.error = f"{type(error).__name__}: {error}"
    trace.ended = time.monotonic()


async def _collect(client: AsyncClient, trace: Trace, *, speculation: bool) -> None:
    params = GenerateParams(**trace.case.params, speculation=speculation)
    async with client.generate(**params) as chunks:
        async for chunk in chunks:
            due = len(trace.token_ids)
            trace.repeated += max(0, due - chunk.offset)
            trace.skipped += max(0, chunk.offset - due)
            trace.token_ids += chunk.token_ids
            trace.arrivals.append(time.monotonic())
        trace.completion = chunks.result


class Traffic:
    """Keeps a number of streams running, over clients that prefer different routers.

    Args:
        clients: taken in turn.
        concurrency: streams at once.

    Attributes:
        traces: of all requests that have begun.
    """

    def __init__(self, clients: Sequence[AsyncClient], concurrency: int, *, speculation: bool = True) -> None:
        self._clients = clients
        self._concurrency = concurrency
        self._speculation = speculation
        self._ended = asyncio.Event()
        self.traces: list[Trace] = []

    async def run(self, pending: Sequence[Case]) -> None:
        """Run all cases in order."""
        places = asyncio.Semaphore(self._concurrency)

        async def one(client: AsyncClient, trace: Trace) -> None:
            try:
                await follow(client, trace, speculation=self._speculation)
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            for i, case in enumerate(pending):
                await places.acquire()
                self.traces.append(Trace(case))
                group.create_task(one(self._clients[i % len(self._clients)], self.traces[-1]))
        self._ended.set()

    async def under_way(self) -> None:
        """Wait until most of the streams at once have tokens and go on; at the longest until none is left."""
        while not self._ended.is_set():
            flowing = sum(bool(trace.arrivals) and not trace.ended for trace in self.traces)
            if flowing > self._concurrency // 2:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 0.01)
