"""The real runs: requests one and a few at a time, which the simulator is fitted to, and a load that it predicts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.local_cluster import running
from benchmarks.peers.peer import PeerError, Settings
from benchmarks.rendered_prompts import Prompts
from benchmarks.slo.load import Record, keep_busy, run_trace
from benchmarks.slo.systems import GATEWAY, Clients, System
from benchmarks.slo.targets import Targets
from benchmarks.slo.trace import Arrival, make_trace, poisson_times

_LONGEST_S = 300.0
_TOGETHER = 4

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        alone: requests that are sent one at a time.
        together: requests that are sent four at a time.
        rate: requests a second of the load.
        window_s: how long they arrive.
        seed: of the traces.
    """

    alone: int
    together: int
    rate: float
    window_s: float
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Lines of a trace with what was measured, in the order in which requests were sent."""

    alone: Lines
    together: Lines
    loaded: Lines


def measure(
    settings: Settings,
    options: Sequence[str],
    system: System,
    prompts: Prompts,
    targets: Targets,
    plan: Plan,
) -> Measured:
    """All runs on a fresh cluster. The same plan gives the same requests for every system.

    Raises:
        PeerError: if it does not start, a request fails, or something takes far too long.
    """
    rng = random.Random(plan.seed)
    alone = make_trace([0.0] * plan.alone, prompts, rng)
    together = make_trace([0.0] * plan.together, prompts, rng)
    loaded = make_trace(poisson_times(plan.rate, plan.window_s, rng), prompts, rng)
    promised = targets if system.promises else None

    async def work(address: str) -> Measured:
        async with asyncio.timeout(_LONGEST_S), Clients(address) as clients:
            submit = clients.submitter(promised)
            warm_up = make_trace([0.0] * 4, prompts, random.Random(plan.seed + 1))

            async def kept_busy(requests: Sequence[Arrival], concurrency: int) -> Lines:
                began = asyncio.get_running_loop().time()
                return _lines(await keep_busy(iter(requests), concurrency, submit, began, _LONGEST_S))

            await kept_busy(_of_nobody(warm_up), 1)
            lone, few = await kept_busy(alone, 1), await kept_busy(together, _TOGETHER)
            return Measured(lone, few, _lines(await run_trace(loaded, submit, _LONGEST_S)))

    with running(settings, (*GATEWAY, *options, *system.options)) as cluster:
        try:
            return asyncio.run(work(cluster.grpc_address))
        except TimeoutError:
            raise PeerError(f"not over after {_LONGEST_S:.0f} s") from None


def _of_nobody(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Requests that leave nothing behind for others."""
    return [Arrival(**{**vars(arrival), "tenant": ""}) for arrival in arrivals]


def _lines(records: Sequence[Record]) -> Lines:
    if failed := [record for record in records if record.outcome == "failed"]:
        raise PeerError(f"{len(failed)} of {len(records)} requests failed: {failed[0].error}")
    return [record.line() for record in sorted(records, key=lambda record: record.arrival.at_s)]
