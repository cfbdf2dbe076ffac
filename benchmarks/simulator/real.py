"""The real runs: requests one and a few at a time, which the simulator is fitted to, and a load that it predicts."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.local_cluster import running
from benchmarks.peers.peer import PeerError, Settings
from benchmarks.rendered_prompts import Prompts
from benchmarks.slo.load import Record, Submit, keep_busy, run_trace
from benchmarks.slo.systems import GATEWAY, Clients, System
from benchmarks.slo.targets import Targets
from benchmarks.slo.trace import Arrival, make_trace, poisson_times

_LONGEST_S = 300.0  # of each part of a round
_TOGETHER = 4
_WARM_UP = 4

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """How much each system gets to do.

    Attributes:
        rounds: the systems take turns, because a machine is not always equally fast.
        alone: requests that are sent one at a time, in each round.
        together: requests that are sent four at a time, in each round; to the system without promises alone.
        rate: requests a second of the load.
        window_s: how long they arrive, in each round.
        seed: of the traces.
    """

    rounds: int
    alone: int
    together: int
    rate: float
    window_s: float
    seed: int = 0


@dataclass
class Measured:
    """Lines of a trace with what was measured, in the order in which requests were sent."""

    alone: Lines = field(default_factory=list)
    together: Lines = field(default_factory=list)
    loaded: Lines = field(default_factory=list)


@dataclass(frozen=True)
class _Round:
    """The requests of a round."""

    alone: Sequence[Arrival]
    together: Sequence[Arrival]
    loaded: Sequence[Arrival]


def measure(
    settings: Settings,
    options: Sequence[str],
    systems: Mapping[str, System],
    prompts: Prompts,
    targets: Targets,
    plan: Plan,
) -> dict[str, Measured]:
    """All runs, each system on a cluster of its own. Every system gets the same requests.

    Raises:
        PeerError: if one does not start, a request fails, or something takes far too long.
    """
    rng, longest_s = random.Random(plan.seed), _LONGEST_S * len(systems) * plan.rounds
    warm_up, *rounds = _requests(plan, prompts, rng)
    with ExitStack() as stack:
        addresses = {
            name: stack.enter_context(running(settings, (*GATEWAY, *options, *system.options))).grpc_address
            for name, system in systems.items()
        }

        async def work() -> dict[str, Measured]:
            found = {name: Measured() for name in systems}
            async with asyncio.timeout(longest_s), AsyncExitStack() as clients:
                submits = {
                    name: (await clients.enter_async_context(Clients(addresses[name]))).submitter(
                        targets if system.promises else None
                    )
                    for name, system in systems.items()
                }
                for submit in submits.values():
                    await _run_round(warm_up, submit, Measured(), 0.0)
                for index, requests in enumerate(rounds):
                    for name in rng.sample(list(systems), len(systems)):
                        # What speculation does for several at a time is predicted, not fitted.
                        wanted = replace(requests, together=()) if systems[name].promises else requests
                        await _run_round(wanted, submits[name], found[name], index * _LONGEST_S)
            return found

        try:
            return asyncio.run(work())
        except TimeoutError:
            raise PeerError(f"not over after {longest_s:.0f} s") from None


def _requests(plan: Plan, prompts: Prompts, rng: random.Random) -> list[_Round]:
    """A warm-up of nobody's requests, and the rounds. They are one trace: no tenant asks the same twice."""
    arrivals = [poisson_times(plan.rate, plan.window_s, rng) for _ in range(plan.rounds)]
    at_once = [0.0] * (plan.alone + plan.together)
    trace = iter(make_trace([0.0] * _WARM_UP + [t for times in arrivals for t in at_once + times], prompts, rng))

    def take(count: int) -> list[Arrival]:
        return list(itertools.islice(trace, count))

    warm_up = _Round([replace(arrival, tenant="") for arrival in take(_WARM_UP)], [], [])
    return [warm_up, *(_Round(take(plan.alone), take(plan.together), take(len(times))) for times in arrivals)]


async def _run_round(requests: _Round, submit: Submit, found: Measured, shift_s: float) -> None:
    """One system's turn: adds what was measured, its times shifted."""
    loop = asyncio.get_running_loop()
    for arrivals, concurrency, lines in (
        (requests.alone, 1, found.alone),
        (requests.together, _TOGETHER, found.together),
    ):
        lines += _lines(await keep_busy(iter(arrivals), concurrency, submit, loop.time(), _LONGEST_S), shift_s)
    found.loaded += _lines(await run_trace(requests.loaded, submit, _LONGEST_S), shift_s)


def _lines(records: Sequence[Record], shift_s: float) -> Lines:
    if failed := [record for record in records if record.outcome == "failed"]:
        raise PeerError(f"{len(failed)} of {len(records)} requests failed: {failed[0].error}")
    in_order = sorted(records, key=lambda record: record.arrival.at_s)
    return [record.line() | {"at_s": round(record.arrival.at_s + shift_s, 6)} for record in in_order]
