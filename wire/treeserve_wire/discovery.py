"""Finds peers: fixed addresses, names that stand for every pod behind them, and Services that are watched."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Sequence

import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.endpoint_watch import KUBERNETES_SCHEME, EndpointWatch
from treeserve_wire.name_lookup import NameLookup
from treeserve_wire.peer_source import PeerSource, peer_address

DNS_SCHEME = "dns://"
INTERVAL_S = 5.0
_NAME = re.compile(r"dns://(?P<host>.*):(?P<port>[0-9]+)")

_log = structlog.get_logger(__name__)


class PeerWatch:
    """Turns configured addresses into peers.

    An address is "host:port" or "unix:/path", taken as it is, or stands for peers that come and go: "dns://name:port"
    for all IP addresses of the name (a headless Service), "kubernetes://namespace/service:port" for all ready endpoints
    of the Service. gRPC alone would not find a new pod while the old ones work.

    Raises:
        InvalidArgumentError: for a name without a port, and what `EndpointWatch` raises.
    """

    def __init__(self, addresses: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        self._sources: dict[str, PeerSource | None] = {a: _source_of(a, interval_s) for a in addresses}

    async def run(self, update: Callable[[tuple[str, ...]], None]) -> None:
        """Call `update` with the peers as soon as any are known and whenever they change.

        They are in the order of the addresses, without repeats. Returns only if all addresses are fixed.
        """
        found: dict[str, tuple[str, ...]] = {a: () if source else (a,) for a, source in self._sources.items()}
        known: tuple[str, ...] = ()

        def tell() -> None:
            nonlocal known
            peers = tuple(dict.fromkeys(itertools.chain(*found.values())))
            if peers != known:
                known = peers
                update(peers)

        async def follow(address: str, source: PeerSource) -> None:
            async for found[address] in source.found():
                tell()

        tell()
        async with asyncio.TaskGroup() as tasks:
            for address, source in self._sources.items():
                if source is not None:
                    tasks.create_task(follow(address, source))


class PolledName:
    """The peers behind "dns://name:port", looked up again and again.

    A name that cannot be resolved, or not yet, keeps its last peers.

    Raises:
        InvalidArgumentError: for a name without a port.
    """

    def __init__(self, address: str, interval_s: float) -> None:
        form = _NAME.fullmatch(address)
        if form is None:
            raise InvalidArgumentError("verifiers", f"{address!r} has no port")
        self._address = address
        self._port = int(form["port"])
        self._lookup = NameLookup(form["host"], self._port)
        self._interval_s = interval_s

    async def found(self) -> AsyncIterator[tuple[str, ...]]:
        """The peers after every question that was answered."""
        while True:
            try:
                ips = await self._lookup.ips()
            except OSError as error:
                _log.warning("name not resolved", address=self._address, error=str(error))
            else:
                yield tuple(peer_address(ip, self._port) for ip in ips)
            await asyncio.sleep(self._interval_s)


def _source_of(address: str, interval_s: float) -> PeerSource | None:
    """What finds the peers behind an address; None if it is one itself."""
    if address.startswith(DNS_SCHEME):
        return PolledName(address, interval_s)
    if address.startswith(KUBERNETES_SCHEME):
        return EndpointWatch(address)
    return None
