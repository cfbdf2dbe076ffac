"""What is done to the processes of a cluster, and in which order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.chaos.probe import holdings, verifier_sockets
from treeserve_cli.cluster import LocalCluster
from treeserve_client import AsyncClient, TreeserveClientError

_WHOLE_TIMEOUT_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Disturbance:
    """One thing that happens to one process.

    Attributes:
        action: kill (SIGKILL), drain (SIGTERM) or pause (SIGSTOP, and SIGCONT after `pause_s`).
        index: which process of the role. Of verifiers it is always the one that runs most.
    """

    action: str
    role: str
    index: int = 0
    pause_s: float = 3.0

    @property
    def kind(self) -> str:
        """What it is called in the result."""
        return f"{self.action} {self.role}"


# Every action on every role, more often on those that hold streams.
FULL = (
    Disturbance("kill", "verifier"),
    Disturbance("kill", "speculator", 0),
    Disturbance("pause", "verifier"),
    Disturbance("kill", "router", 0),
    Disturbance("drain", "verifier"),
    Disturbance("kill", "valkey"),
    Disturbance("pause", "verifier"),
    Disturbance("drain", "router", 1),
    Disturbance("pause", "speculator", 1),
    Disturbance("kill", "verifier"),
    Disturbance("pause", "router", 1),
    Disturbance("drain", "speculator", 1),
    Disturbance("kill", "router", 1),
    Disturbance("pause", "valkey"),
    Disturbance("drain", "verifier"),
    Disturbance("drain", "router", 0),
)
SHORT = (
    Disturbance("kill", "verifier"),
    Disturbance("pause", "verifier"),
    Disturbance("kill", "router", 0),
    Disturbance("drain", "verifier"),
    Disturbance("kill", "valkey"),
    Disturbance("drain", "router", 1),
)


async def disturb(cluster: LocalCluster, disturbance: Disturbance) -> float:
    """Do it; returns when it began, on the monotonic clock."""
    index = await _busiest(cluster) if disturbance.role == "verifier" else disturbance.index
    child = cluster.processes[disturbance.role][index]
    began = time.monotonic()
    if disturbance.action == "pause":
        pid = child.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(disturbance.pause_s)
        os.kill(pid, signal.SIGCONT)
    else:
        child.kill(signal.SIGKILL if disturbance.action == "kill" else signal.SIGTERM)
    return began


async def _busiest(cluster: LocalCluster) -> int:
    held = [(await holdings(socket)).sequences for socket in verifier_sockets(cluster)]
    return held.index(max(held))


async def until_whole(cluster: LocalCluster) -> None:
    """Wait until all processes run and each router serves with all verifiers and speculators again.

    Raises:
        TimeoutError: if that takes too long.
    """
    await asyncio.sleep(5 * _POLL_S)  # until the supervisor has noticed what ended
    async with asyncio.timeout(_WHOLE_TIMEOUT_S), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(address)) for address in cluster.grpc_addresses]
        while not await _is_whole(cluster, clients):  # noqa: ASYNC110 (processes have no event)
            await asyncio.sleep(_POLL_S)


async def _is_whole(cluster: LocalCluster, routers: Sequence[AsyncClient]) -> bool:
    config = cluster.config
    if not all(child.is_running for group in cluster.processes.values() for child in group):
        return False
    try:
        models = [await router.get_model(config.served_name, deadline_s=2) for router in routers]
    except TreeserveClientError:
        return False
    wanted = (config.verifiers, config.speculators)
    return all((model.verifiers, model.speculators) == wanted for model in models)
