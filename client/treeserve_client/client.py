"""The clients: thin sync and async shells around `Generation`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Unpack

import grpc

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_client.errors import Cancelled, from_rpc
from treeserve_client.generation import CallOptions, Generation
from treeserve_client.request import GenerateParams, build_request
from treeserve_client.types import Chunk, Completion, Model, Started

_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A router that comes back is found within seconds; gRPC's own default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


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

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub, generation: Generation) -> None:
        super().__init__(generation)
        self._stub = stub
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
        return self._stub.Generate(self._generation.request, timeout=self._generation.remaining_s)

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

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, generation: Generation) -> None:
        super().__init__(generation)
        self._stub = stub
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
        return self._stub.Generate(self._generation.request, timeout=self._generation.remaining_s)

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
                if delay_s is None:
                    return
                await asyncio.sleep(delay_s)
                self._call = self._open()
        finally:
            self._call.cancel()


class Client:
    """A connection to a router at "host:port" or "unix:/path"; threads may share it.

    Args:
        max_resumes: how often a generation whose router went away is taken up again where it broke off. The router, or
            another at its address, has half a minute to come back each time.
    """

    def __init__(self, address: str, *, max_resumes: int = 5) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._max_resumes = max_resumes

    def generate(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Stream:
        """Start a generation and stream it. `deadline_s` bounds all of it, resumes included.

        Raises:
            InvalidArgument: if the parameters make no request. All else is raised while iterating.
        """
        options = CallOptions(deadline_s, self._max_resumes)
        return Stream(self._stub, Generation(build_request(params), options))

    def complete(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Completion:
        """Generate and wait for all of it. Raises TreeserveClientError."""
        with self.generate(deadline_s=deadline_s, **params) as stream:
            for _chunk in stream:
                pass
            return stream.result

    def list_models(self, *, deadline_s: float | None = None) -> list[Model]:
        """The models that can be served now, sorted by name. Raises TreeserveClientError."""
        try:
            response = self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=deadline_s)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return [Model.from_proto(model) for model in response.models]

    def get_model(self, name: str, *, deadline_s: float | None = None) -> Model:
        """One model. Raises NotFound if no verifier serves it, or another TreeserveClientError."""
        try:
            response = self._stub.GetModel(inference_pb2.GetModelRequest(name=name), timeout=deadline_s)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return Model.from_proto(response.model)

    def close(self) -> None:
        """Close the connection; running streams end with Cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same parameters, results and errors. Build it inside the event loop."""

    def __init__(self, address: str, *, max_resumes: int = 5) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channel
        )
        self._max_resumes = max_resumes

    def generate(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> AsyncStream:
        """Start a generation and stream it; see `Client.generate`."""
        options = CallOptions(deadline_s, self._max_resumes)
        return AsyncStream(self._stub, Generation(build_request(params), options))

    async def complete(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Completion:
        """Generate and wait for all of it. Raises TreeserveClientError."""
        async with self.generate(deadline_s=deadline_s, **params) as stream:
            async for _chunk in stream:
                pass
            return stream.result

    async def list_models(self, *, deadline_s: float | None = None) -> list[Model]:
        """The models that can be served now, sorted by name. Raises TreeserveClientError."""
        try:
            response = await self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=deadline_s)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return [Model.from_proto(model) for model in response.models]

    async def get_model(self, name: str, *, deadline_s: float | None = None) -> Model:
        """One model. Raises NotFound if no verifier serves it, or another TreeserveClientError."""
        try:
            response = await self._stub.GetModel(inference_pb2.GetModelRequest(name=name), timeout=deadline_s)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return Model.from_proto(response.model)

    async def close(self) -> None:
        """Close the connection; running streams end with Cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
