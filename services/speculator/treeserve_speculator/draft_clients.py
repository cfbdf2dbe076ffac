"""One draft client for each verifier that discovery finds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable

from treeserve_speculator.draft_client import DraftClient


class DraftClients:
    """Draft clients by verifier address. Belongs to the event loop.

    A verifier that discovery no longer finds may be draining: its stream goes on until the verifier ends it.

    Args:
        make_client: builds the client of an address.
    """

    def __init__(self, make_client: Callable[[str], DraftClient]) -> None:
        self._make_client = make_client
        self._clients: dict[str, DraftClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """Verifiers that have a client, those that are no longer wanted included."""
        return tuple(self._clients)

    def update(self, addresses: Iterable[str]) -> None:
        """Serve these verifiers, and leave the others when their streams end."""
        wanted = set(addresses)
        for address in sorted(wanted - self._clients.keys()):
            client = self._clients[address] = self._make_client(address)
            task = self._tasks[address] = asyncio.create_task(client.run(), name=f"draft {address}")
            task.add_done_callback(functools.partial(self._forget, address))
        for address, client in self._clients.items():
            client.wanted = address in wanted

    async def stop(self) -> None:
        """End all streams; returns when none is left."""
        for client in self._clients.values():
            client.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _forget(self, address: str, _task: asyncio.Task[None]) -> None:
        del self._clients[address], self._tasks[address]
