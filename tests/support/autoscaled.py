"""A simulated cluster whose verifiers come and go as an autoscaler has it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from treeserve_core.errors import UnavailableError
from treeserve_router.autoscaling import Autoscaler, Role
from treeserve_simulator.quiet import warnings_only
from treeserve_simulator.record import Record
from treeserve_simulator.router import SimulatedRouter
from treeserve_simulator.systems import Cluster, System
from treeserve_simulator.text import Text
from treeserve_simulator.trace import TraceRequest
from treeserve_simulator.verifier import SimulatedVerifier
from treeserve_simulator.virtual_time import run_virtual

# Speculation changes no share of anything here, and takes most of the time that simulating takes.
PLAIN = System("plain", "qos", speculates=False, keeps_promises=True)
_LOOK_S = 15.0


@dataclass(frozen=True)
class Look:
    """What an autoscaler saw and did: `wanted` is None where it was told nothing."""

    at_s: float
    wanted: float | None
    verifiers: int


@dataclass
class ToyHpa:
    """What the horizontal pod autoscaler makes of a metric with an average target of 1, as Kubernetes documents it."""

    most: int = 12
    window_s: float = 300.0
    tolerance: float = 0.1
    _wishes: list[tuple[float, int]] = field(default_factory=list)

    def decide(self, now: float, wanted: float | None, current: int) -> int:
        """Replicas from now on."""
        if wanted is None:  # a metric that cannot be had
            return current
        within = abs(wanted / current - 1.0) <= self.tolerance
        wish = current if within else min(max(math.ceil(wanted), 1), self.most)
        self._wishes = [(at, n) for at, n in self._wishes if at > now - self.window_s] + [(now, wish)]
        return max(wish, min(current, max(n for _, n in self._wishes)))


def keep(now: float, wanted: float | None, current: int) -> int:
    """An autoscaler that leaves all as it is."""
    return current


def run_scaled(
    trace: Sequence[TraceRequest],
    cluster: Cluster,
    decide: Callable[[float, float | None, int], int] = keep,
    start_up_s: float = 30.0,
) -> tuple[list[Record], list[Look]]:
    """Run a trace on as many verifiers as `decide` says every 15 s, beginning with those of the cluster.

    Args:
        decide: takes the time, what the load wants, and the replicas there are or will be.
        start_up_s: what a new verifier takes to be ready.
    """
    with warnings_only():
        return run_virtual(_run(trace, cluster, decide, start_up_s))


async def _run(
    trace: Sequence[TraceRequest],
    cluster: Cluster,
    decide: Callable[[float, float | None, int], int],
    start_up_s: float,
) -> tuple[list[Record], list[Look]]:
    loop = asyncio.get_running_loop()
    texts: dict[str, Text] = {}
    verifiers: list[SimulatedVerifier] = []
    looks: list[Look] = []
    async with asyncio.TaskGroup() as tasks:

        def verifier() -> SimulatedVerifier:
            config = cluster.verifier_config(PLAIN, len(verifiers))
            verifiers.append(SimulatedVerifier(config, cluster.machine, texts, tasks, speculates=False))
            return verifiers[-1]

        serving = {f"verifier-{len(verifiers)}": verifier().connect for _ in range(cluster.verifiers)}
        router = SimulatedRouter(cluster, PLAIN, texts, serving, tasks, seed=0)
        await router.ready()
        autoscaler = Autoscaler(100, loop.time)
        watching = tasks.create_task(router.load_watch(autoscaler).run())

        async def scale() -> None:
            replicas = len(serving)
            while True:
                await asyncio.sleep(_LOOK_S)
                wanted = None
                with contextlib.suppress(UnavailableError):
                    wanted = autoscaler.wanted(Role.VERIFIER)
                looks.append(Look(loop.time(), wanted, replicas))
                wish = decide(loop.time(), wanted, replicas)
                for _ in range(replicas, wish):
                    loop.call_later(start_up_s, begin)
                for _ in range(min(wish, len(serving)), len(serving)):
                    serving.popitem()
                router.connect(dict(serving))
                replicas = wish

        def begin() -> None:
            serving[f"verifier-{len(verifiers)}"] = verifier().connect
            router.connect(dict(serving))

        scaling = tasks.create_task(scale())
        records = await asyncio.gather(*(_send(router, i, request) for i, request in enumerate(trace)))
        scaling.cancel()
        watching.cancel()
        await router.close()
        for each in verifiers:
            each.close()
    return records, looks


async def _send(router: SimulatedRouter, number: int, request: TraceRequest) -> Record:
    await asyncio.sleep(request.at_s)
    return await router.generate(number, request)


def settled(looks: Sequence[Look], after_s: float, until_s: float) -> Iterator[float]:
    """What the load wanted meanwhile."""
    return (look.wanted for look in looks if look.wanted is not None and after_s < look.at_s <= until_s)
