"""Runs a trace through a simulated cluster and says what became of every request."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from treeserve_simulator.quiet import warnings_only
from treeserve_simulator.record import Record
from treeserve_simulator.router import SimulatedRouter
from treeserve_simulator.systems import Cluster, System
from treeserve_simulator.text import Text
from treeserve_simulator.trace import TraceRequest
from treeserve_simulator.verifier import SimulatedVerifier
from treeserve_simulator.virtual_time import run_virtual

_SETTLE_S = 1.0  # what is under way when the last request ends: cancels, commits, reports


class LeakError(RuntimeError):
    """Something of a request is left when all have ended."""


@dataclass(frozen=True)
class Outcome:
    """What a system made of a trace.

    Attributes:
        records: one for each request, in the trace's order.
        simulated_s: time until the last request ended.
        cpu_s: time that simulating took on one core.
        busy_share: of that time, the share in which verifiers ran steps, over all of them.
        steps, rows: forward passes, and their rows.
        pauses: sequences paused for more urgent ones.
        preemptions: sequences that gave their KV blocks back because there were no more.
    """

    system: str
    records: tuple[Record, ...]
    simulated_s: float
    cpu_s: float
    busy_share: float
    steps: int
    rows: int
    pauses: int
    preemptions: int


def simulate(trace: Sequence[TraceRequest], cluster: Cluster, system: System, seed: int = 0) -> Outcome:
    """Run a trace; equal arguments give equal records.

    Raises:
        LeakError: if a sequence or a KV block is left at the end.
    """
    with _without_garbage_collection(), warnings_only():
        return run_virtual(_simulate(trace, cluster, system, seed))


async def _simulate(trace: Sequence[TraceRequest], cluster: Cluster, system: System, seed: int) -> Outcome:
    began, loop = time.process_time(), asyncio.get_running_loop()
    texts: dict[str, Text] = {}
    async with asyncio.TaskGroup() as tasks:
        verifiers = [
            SimulatedVerifier(
                cluster.verifier_config(system, i), cluster.machine, texts, tasks, speculates=system.speculates
            )
            for i in range(cluster.verifiers)
        ]
        connect = {f"verifier-{i}": verifier.connect for i, verifier in enumerate(verifiers)}
        router = SimulatedRouter(cluster, system, texts, connect, tasks, seed)
        await router.ready()
        started_s = loop.time()
        records = await _arrive(trace, router.generate)
        simulated_s = loop.time() - started_s
        await asyncio.sleep(_SETTLE_S)
        await router.close()
        for verifier in verifiers:
            verifier.close()
    _check_nothing_is_left(verifiers, texts)
    return Outcome(
        system.name,
        tuple(records),
        simulated_s,
        time.process_time() - began,
        sum(v.executor.busy_s for v in verifiers) / (simulated_s * len(verifiers)) if simulated_s else 0.0,
        sum(v.executor.steps for v in verifiers),
        sum(v.executor.rows for v in verifiers),
        sum(v.scheduler.pauses for v in verifiers),
        sum(v.scheduler.preemptions for v in verifiers),
    )


async def _arrive(
    trace: Sequence[TraceRequest], generate: Callable[[int, TraceRequest], Awaitable[Record]]
) -> list[Record]:
    """Send each request when it is due, and a session's turns one after another."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    last_turns: dict[str, asyncio.Task[Record]] = {}
    tasks: list[asyncio.Task[Record]] = []

    async def send(number: int, request: TraceRequest, before: asyncio.Task[Record] | None) -> Record:
        if before is not None:
            await asyncio.wait([before])
        return await generate(number, request)

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(trace):
            await asyncio.sleep(began + request.at_s - loop.time())
            task = group.create_task(send(number, request, last_turns.get(request.session)))
            tasks.append(task)
            if request.session:
                last_turns[request.session] = task
    return [task.result() for task in tasks]


def _check_nothing_is_left(verifiers: Sequence[SimulatedVerifier], texts: dict[str, Text]) -> None:
    if texts:
        raise LeakError(f"{len(texts)} requests have not ended, {next(iter(texts))} among them")
    for verifier in verifiers:
        verifier.blocks.check_integrity()
        if len(verifier.scheduler) or verifier.blocks.free_blocks != verifier.blocks.total_blocks:
            held = verifier.blocks.total_blocks - verifier.blocks.free_blocks
            raise LeakError(f"a verifier is left with {len(verifier.scheduler)} sequences and {held} KV blocks")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of live objects make each full collection slow, and next to none of them is a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
