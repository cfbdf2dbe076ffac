"""A Decode call without a network: both ends in this process, frames delayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from treeserve.verifier.v1 import verifier_pb2 as pb

T = TypeVar("T")


class _Pipe(Generic[T]):
    """Frames in order, each readable `delay_s` after it was written."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._under_way: deque[T] = deque()
        self._arrived: asyncio.Queue[T] = asyncio.Queue()

    def put(self, frame: T) -> None:
        self._under_way.append(frame)
        asyncio.get_running_loop().call_later(self._delay_s, self._arrive)

    async def get(self) -> T:
        return await self._arrived.get()

    def _arrive(self) -> None:
        # Whichever timer fires first: frames do not overtake each other.
        self._arrived.put_nowait(self._under_way.popleft())


class DecodeCallPair:
    """A stream that never breaks. `router` and `verifier` are its ends, as either side expects them."""

    def __init__(self, delay_s: float) -> None:
        requests, responses = _Pipe[pb.DecodeRequest](delay_s), _Pipe[pb.DecodeResponse](delay_s)
        self.router = RouterEnd(requests, responses)
        self.verifier = VerifierEnd(requests, responses)


class RouterEnd:
    """In place of the client's call object."""

    def __init__(self, requests: _Pipe[pb.DecodeRequest], responses: _Pipe[pb.DecodeResponse]) -> None:
        self._requests = requests
        self._responses = responses

    async def read(self) -> pb.DecodeResponse:
        """The next frame."""
        return await self._responses.get()

    async def write(self, frame: pb.DecodeRequest) -> None:
        """Send a frame."""
        self._requests.put(frame)


class VerifierEnd:
    """In place of the server's request iterator and context."""

    def __init__(self, requests: _Pipe[pb.DecodeRequest], responses: _Pipe[pb.DecodeResponse]) -> None:
        self._requests = requests
        self._responses = responses

    async def requests(self) -> AsyncIterator[pb.DecodeRequest]:
        """Frames of the router; endless."""
        while True:
            yield await self._requests.get()

    async def write(self, frame: pb.DecodeResponse) -> None:
        """Send a frame."""
        self._responses.put(frame)
