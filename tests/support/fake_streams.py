"""Streams and records for the benchmarks' load generator: what a server would have sent, on the loop's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from benchmarks.slo.load import Record
from benchmarks.slo.trace import Arrival
from treeserve_client import Chunk, ServiceClass, TreeserveClientError


def arrival(
    at_s: float = 0.0, service_class: ServiceClass = "standard", tenant: str = "t", tokens: int = 4, prompt: int = 10
) -> Arrival:
    return Arrival(at_s, "chat", service_class, tenant, tuple(range(prompt)), tokens)


def record(
    service_class: ServiceClass = "standard",
    at_s: float = 0.0,
    ttft_s: float = 0.1,
    tpot_s: float = 0.01,
    tokens: int = 5,
    tenant: str = "t",
) -> Record:
    """A finished request: one token at first, then one every `tpot_s`."""
    chunks = tuple((at_s + ttft_s + i * tpot_s, 1) for i in range(tokens))
    return Record(arrival(at_s, service_class, tenant, tokens), "finished", chunks, tuple(range(tokens)))


@dataclass(eq=False)
class FakeStream:
    """Sends `tokens` one by one, each `gap_s` after the one before, then ends or fails."""

    tokens: int = 4
    gap_s: float = 0.1
    error: TreeserveClientError | None = None
    closed: bool = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for offset in range(self.tokens):
            await asyncio.sleep(self.gap_s)
            yield Chunk(offset, (offset,), "x")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class FakeServer:
    """Answers every request with a stream of its length, and notes when it came and how many ran at once."""

    gap_s: float = 0.1
    error: TreeserveClientError | None = None
    came: list[tuple[float, Arrival]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    most_at_once: int = 0

    def submit(self, request: Arrival) -> FakeStream:
        self.came.append((asyncio.get_running_loop().time(), request))
        tokens = 0 if self.error is not None else request.output_tokens
        self.streams.append(FakeStream(tokens, self.gap_s, self.error))
        self.most_at_once = max(self.most_at_once, sum(not stream.closed for stream in self.streams))
        return self.streams[-1]
