"""One draft client for each verifier that discovery finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from treeserve_speculator.draft_client import DraftClient


class DraftClients:
    """Draft clients by verifier address. Belongs to the event loop.

    Args:
        make_client: builds the client of an address.
    """

    def __init__(self, make_client: Callable[[str], DraftClient]) -> None:
        self._make_client = make_client
        self._clients: dict[str, DraftClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Verifiers served now."""
        return tuple(self._clients)

    def update(self, addresses: Iterable[str]) -> None:
        """Serve exactly these verifiers: begin with new ones, end with those that are gone."""
        wanted = set(addresses)
        for address in self._clients.keys() - wanted:
            self._clients.pop(address).stop()
        for address in sorted(wanted - self._clients.keys()):
            client = self._clients[address] = self._make_client(address)
            task = asyncio.create_task(client.run(), name=f"draft {address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End all streams; returns when none is left."""
        self.update(())
        await asyncio.gather(*self._tasks, return_exceptions=True)
