"""Looks into the processes of a cluster: free KV blocks of verifiers, counters of routers."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treeserve.verifier.v1 import verifier_pb2
from treeserve.verifier.v1.verifier_pb2_grpc import VerifierServiceStub
from treeserve_cli.cluster import LocalCluster
from treeserve_core.identity import PROTOCOL_VERSION
from treeserve_wire.channel import open_channel

COUNTERS = (
    'treeserve_router_hedges_total{outcome="started"}',
    'treeserve_router_hedges_total{outcome="won"}',
    "treeserve_router_moves_total",
    "treeserve_router_replays_total",
)
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Holdings:
    """What a verifier holds: sequences, and KV blocks that are not free."""

    sequences: int
    blocks: int


def verifier_sockets(cluster: LocalCluster) -> list[Path]:
    """Where the verifiers of a cluster listen, by index."""
    return [cluster.run_dir / f"verifier-{i}.sock" for i in range(cluster.config.verifiers)]


async def holdings(socket: Path) -> Holdings:
    """Ask a verifier, as a router that connects. Raises TimeoutError if it does not answer."""
    hello = verifier_pb2.DecodeHello(protocol_version=PROTOCOL_VERSION, router_id="chaos", initial_credit=1)
    async with asyncio.timeout(_TIMEOUT_S), open_channel(f"unix:{socket}") as channel:
        call = VerifierServiceStub(channel).Decode()
        await call.write(verifier_pb2.DecodeRequest(hello=hello))
        while True:
            frame = await call.read()
            if isinstance(frame, verifier_pb2.DecodeResponse) and frame.WhichOneof("frame") == "load":
                call.cancel()
                return Holdings(frame.load.sequences, frame.load.total_blocks - frame.load.free_blocks)


class RouterCounters:
    """Sums of the routers' counters over their restarts, which begin at 0 again.

    Args:
        addresses: where their metrics are, "host:port".
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._last: dict[tuple[str, str], float] = {}
        self.totals: Counter[str] = Counter()

    async def watch(self, interval_s: float = 0.5) -> None:
        """Read them again and again, until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(interval_s)

    async def read(self) -> None:
        """Read them once; a router that does not answer is left out."""
        for address in self._addresses:
            try:
                text = await asyncio.to_thread(_fetch, f"http://{address}/metrics")
            except OSError:
                continue
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if name in COUNTERS:
                    self._note((address, name), float(value))

    def _note(self, key: tuple[str, str], value: float) -> None:
        last = self._last.get(key, 0.0)
        self.totals[key[1]] += round(value - last if value >= last else value)
        self._last[key] = value


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=1) as response:
        body: bytes = response.read()
    return body.decode()
