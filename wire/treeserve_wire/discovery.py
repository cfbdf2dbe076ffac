"""Finds peers: fixed addresses, and names that stand for every pod behind them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.name_lookup import NameLookup

DNS_SCHEME = "dns://"
INTERVAL_S = 5.0
_PORT = re.compile(r":[0-9]+$")

_log = structlog.get_logger(__name__)


class PeerWatch:
    """Turns configured addresses into peers.

    An address is "host:port" or "unix:/path", taken as it is, or "dns://name:port", which stands for all IP addresses
    of the name (a headless Service) and is looked up again and again: gRPC alone would not find a new pod while the old
    ones work. A name that cannot be resolved, or not yet, keeps its last peers.

    Raises:
        InvalidArgumentError: for a name without a port.
    """

    def __init__(self, addresses: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        self._addresses = tuple(addresses)
        self._interval_s = interval_s
        self._lookups: dict[str, NameLookup] = {}
        for address in self._addresses:
            if address.startswith(DNS_SCHEME):
                if not _PORT.search(address):
                    raise InvalidArgumentError("verifiers", f"{address!r} has no port")
                host, port = _host_and_port(address)
                self._lookups[address] = NameLookup(host, int(port))
        self._resolved: dict[str, tuple[str, ...]] = {}

    async def run(self, update: Callable[[tuple[str, ...]], None]) -> None:
        """Call `update` with the peers at once and whenever they change; returns only if no address is a name."""
        known: tuple[str, ...] | None = None
        while True:
            peers = await self.peers()
            if peers != known:
                known = peers
                update(peers)
            if not self._lookups:
                return
            await asyncio.sleep(self._interval_s)

    async def peers(self) -> tuple[str, ...]:
        """The peers now, in the order of the addresses, without repeats."""
        found: dict[str, None] = {}
        for address in self._addresses:
            if address in self._lookups:
                found |= dict.fromkeys(await self._resolve(address))
            else:
                found[address] = None
        return tuple(found)

    async def _resolve(self, address: str) -> tuple[str, ...]:
        _, port = _host_and_port(address)
        try:
            ips = await self._lookups[address].ips()
        except OSError as error:
            _log.warning("name not resolved", address=address, error=str(error))
            return self._resolved.get(address, ())
        self._resolved[address] = tuple(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips)
        return self._resolved[address]


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
    return host, port
