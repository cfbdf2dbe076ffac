"""Every router knows what was said last about the load, whoever asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from support.sequences import make_config

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity
from treeserve_verifier.decode_stream import DecodeHandler
from treeserve_verifier.load import Load


class Router:
    """A router's end of a stream, without a network."""

    def __init__(self, handler: DecodeHandler) -> None:
        self._requests: asyncio.Queue[verifier_pb2.DecodeRequest] = asyncio.Queue()
        self.loads: list[int] = []
        hello = verifier_pb2.DecodeHello(protocol_version=PROTOCOL_VERSION, router_id="r", initial_credit=9)
        self._requests.put_nowait(verifier_pb2.DecodeRequest(hello=hello))
        self.stream = asyncio.create_task(handler.serve(self._sent(), self))

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._requests.put_nowait(verifier_pb2.DecodeRequest(cancel=verifier_pb2.Cancel()))

    async def write(self, frame: verifier_pb2.DecodeResponse) -> None:
        """What the verifier calls to send a frame."""
        if frame.HasField("load"):
            self.loads.append(frame.load.free_blocks)

    async def _sent(self) -> AsyncIterator[verifier_pb2.DecodeRequest]:
        while True:
            yield await self._requests.get()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_one_router_asked_for_is_told_to_all() -> None:
    loop: Any = SimpleNamespace(load=lambda: Load(1, 640, 0, False))
    identity = ModelIdentity("m", "ab", 300, 320, (0, 2))
    handler = DecodeHandler(make_config(), identity, loop, intake=None, total_blocks=640)
    asking, silent = routers = Router(handler), Router(handler)
    await settle()
    for free_blocks in range(635, 500, -5):  # each time too few to report them unasked
        loop.load = partial(Load, 1, free_blocks, 0, False)
        asking.ping()
        await settle()
        handler.update()
        await settle()
    for router in routers:
        router.stream.cancel()
    assert asking.loads[-1] == silent.loads[-1] == 505
