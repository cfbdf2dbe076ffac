"""The speculator follows the verifiers that discovery finds."""

from __future__ import annotations

import asyncio
from typing import cast

from treeserve_speculator.draft_client import DraftClient
from treeserve_speculator.draft_clients import DraftClients


class _Client:
    """Holds one stream, which ends when the verifier or `stop` says so."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.wanted = True
        self.stream_ended = asyncio.Event()

    def stop(self) -> None:
        self.stream_ended.set()

    async def run(self) -> None:
        await self.stream_ended.wait()


async def test_verifiers_come_and_go_and_none_is_left_at_the_end() -> None:
    made: dict[str, _Client] = {}

    def make(address: str) -> DraftClient:
        assert address not in made
        made[address] = _Client(address)
        return cast(DraftClient, made[address])

    clients = DraftClients(make)
    clients.update(("a", "b"))
    clients.update(("b", "c"))
    assert set(clients.addresses) == {"a", "b", "c"}, "a may be draining: its stream goes on"
    assert {address: client.wanted for address, client in made.items()} == {"a": False, "b": True, "c": True}
    made["a"].stream_ended.set()
    await asyncio.sleep(0.01)
    assert set(clients.addresses) == {"b", "c"}
    await clients.stop()
    await asyncio.sleep(0)
    assert clients.addresses == ()
