"""Finds peers: fixed addresses, and names that stand for every pod behind them."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence

import structlog

from treeserve_core.errors import InvalidArgumentError

DNS_SCHEME = "dns://"
INTERVAL_S = 5.0
_PORT = re.compile(r":[0-9]+$")

_log = structlog.get_logger(__name__)


class PeerWatch:
    """Turns configured addresses into peers.

    An address is "host:port" or "unix:/path", taken as it is, or "dns://name:port", which stands for all IP addresses
    of the name (a headless Service) and is looked up again and again: gRPC alone would not find a new pod while the old
    ones work. A name that cannot be resolved keeps its last peers.

    Raises:
        InvalidArgumentError: for a name without a port.
    """

    def __init__(self, addresses: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        self._addresses = tuple(addresses)
        self._interval_s = interval_s
        for address in self._addresses:
            if address.startswith(DNS_SCHEME) and not _PORT.search(address):
                raise InvalidArgumentError("verifiers", f"{address!r} has no port")
        self._resolved: dict[str, tuple[str, ...]] = {}

    async def run(self, update: Callable[[tuple[str, ...]], None]) -> None:
        """Call `update` with the peers at once and whenever they change; returns only if no address is a name."""
        known: tuple[str, ...] | None = None
        while True:
            peers = await self.peers()
            if peers != known:
                known = peers
                update(peers)
            if not any(address.startswith(DNS_SCHEME) for address in self._addresses):
                return
            await asyncio.sleep(self._interval_s)

    async def peers(self) -> tuple[str, ...]:
        """The peers now, in the order of the addresses, without repeats."""
        found: dict[str, None] = {}
        for address in self._addresses:
            if address.startswith(DNS_SCHEME):
                found |= dict.fromkeys(await self._resolve(address))
            else:
                found[address] = None
        return tuple(found)

    async def _resolve(self, address: str) -> tuple[str, ...]:
        host, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            _log.warning("name not resolved", address=address, error=str(error))
            return self._resolved.get(address, ())
        ips = sorted({info[4][0] for info in infos})
        self._resolved[address] = tuple(f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}" for ip in ips)
        return self._resolved[address]
