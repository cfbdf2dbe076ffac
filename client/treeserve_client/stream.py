"""One generation as an iterator over its chunks, sync and async, resumed where it breaks off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeAlias

import grpc

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_client.errors import Cancelled, InvalidArgument, NotFound, from_rpc
from treeserve_client.generation import Generation
from treeserve_client.routers import Routers
from treeserve_client.types import Chunk, Completion, Started

Stub: TypeAlias = inference_pb2_grpc.InferenceServiceStub
AsyncStub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"
SyncRouters: TypeAlias = Routers[grpc.Channel, Stub]
AsyncRouters: TypeAlias = Routers[grpc.aio.Channel, AsyncStub]


class _StreamState:
    """What both kinds of stream show."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def started(self) -> Started | None:
        """What the router admitted: seed, prompt length, ids. None until it has, at the latest with the first chunk."""
        return self._generation.started

    @property
    def result(self) -> Completion:
        """The whole completion, once the iterator is exhausted. Raises RuntimeError before."""
        if self._generation.result is None:
            raise RuntimeError("the generation has not finished")
        return self._generation.result


class Stream(_StreamState):
    """An iterator over the chunks of one generation, which runs already.

    Iterating raises TreeserveClientError if the generation fails. Closing the stream, or leaving its ``with`` block,
    cancels what still runs.
    """

    def __init__(self, routers: SyncRouters, generation: Generation) -> None:
        super().__init__(generation)
        self._routers = routers
        self._closed = threading.Event()
        self._call = self._open()
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the generation if it still runs; iteration ends. Any thread may call it, and again."""
        self._closed.set()
        self._call.cancel()

    def _open(self) -> Any:  # an iterator of responses with cancel(); grpc's type for it has no public name
        self._stub = self._routers.stub
        generation = self._generation
        return self._stub.Generate(generation.request, timeout=generation.remaining_s, metadata=generation.metadata)

    def _run(self) -> Iterator[Chunk]:
        try:
            while not self._closed.is_set():
                try:
                    for event in self._call:
                        chunk = self._generation.receive(event)
                        if chunk is not None:
                            yield chunk
                    self._generation.check_ended()
                    return
                except grpc.RpcError as error:
                    if self._closed.is_set():
                        return
                    delay_s = self._generation.resume_delay_s(error)
                    if _is_unavailable(error):
                        self._routers.turn_away(self._stub)
                if delay_s is None or self._closed.wait(delay_s):
                    return
                self._call = self._open()
        finally:
            self._call.cancel()


class AsyncStream(_StreamState):
    """An async iterator over the chunks of one generation, which runs already.

    Iterating raises TreeserveClientError if the generation fails. Closing the stream, or leaving its ``async with``
    block, cancels what still runs.
    """

    def __init__(self, routers: AsyncRouters, generation: Generation) -> None:
        super().__init__(generation)
        self._routers = routers
        self._closed = False
        self._call = self._open()
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the generation if it still runs; iteration ends. Any task may call it, and again."""
        self._closed = True
        self._call.cancel()

    def _open(self) -> grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        self._stub = self._routers.stub
        generation = self._generation
        return self._stub.Generate(generation.request, timeout=generation.remaining_s, metadata=generation.metadata)

    async def _run(self) -> AsyncIterator[Chunk]:
        try:
            while not self._closed:
                try:
                    async for event in self._call:
                        chunk = self._generation.receive(event)
                        if chunk is not None:
                            yield chunk
                    self._generation.check_ended()
                    return
                except asyncio.CancelledError:
                    # Raised for a call that a `close` cancelled, too; only a task's own cancellation goes on.
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    if not self._closed:
                        raise Cancelled("the client was closed") from None
                    return
                except grpc.RpcError as error:
                    delay_s = self._generation.resume_delay_s(error)
                    if _is_unavailable(error):
                        self._routers.turn_away(self._stub)
                if delay_s is None:
                    return
                await asyncio.sleep(delay_s)
                self._call = self._open()
        finally:
            self._call.cancel()


def _is_unavailable(error: grpc.RpcError) -> bool:
    """Whether the router is; one that knows nothing of the request to resume works, and takes the whole of it."""
    return not isinstance(from_rpc(error), NotFound | InvalidArgument)
