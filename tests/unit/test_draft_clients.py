"""The speculator follows the verifiers that discovery finds."""

from __future__ import annotations

import asyncio
from typing import cast

from treeserve_speculator.draft_client import DraftClient
from treeserve_speculator.draft_clients import DraftClients


class _Client:
    def __init__(self, address: str) -> None:
        self.address = address
        self.stopped = asyncio.Event()
        self.ended = False

    def stop(self) -> None:
        self.stopped.set()

    async def run(self) -> None:
        await self.stopped.wait()
        await asyncio.sleep(0.01)
        self.ended = True


async def test_verifiers_come_and_go_and_none_is_left_at_the_end() -> None:
    made: list[_Client] = []

    def make(address: str) -> DraftClient:
        made.append(_Client(address))
        return cast(DraftClient, made[-1])

    clients = DraftClients(make)
    clients.update(("a", "b"))
    clients.update(("b", "c"))
    assert [c.address for c in made] == ["a", "b", "c"]
    assert [c.stopped.is_set() for c in made] == [True, False, False]
    assert set(clients.addresses) == {"b", "c"}
    await clients.stop()
    assert clients.addresses == () and all(c.ended for c in made)
