"""The clients: thin sync and async shells around `Generation`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack

import grpc

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_client.errors import Cancelled, InvalidArgument, NotFound, Unavailable, from_rpc
from treeserve_client.explanation import Explanation
from treeserve_client.generation import CallOptions, Generation
from treeserve_client.request import GenerateParams, build_request
from treeserve_client.routers import Routers
from treeserve_client.types import Chunk, Completion, Model, Started

_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A router that comes back is found within seconds; gRPC's own default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_Stub: TypeAlias = inference_pb2_grpc.InferenceServiceStub
_AsyncStub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"
_SyncRouters: TypeAlias = Routers[grpc.Channel, _Stub]
_AsyncRouters: TypeAlias = Routers[grpc.aio.Channel, _AsyncStub]
_T = TypeVar("_T")

Metadata: TypeAlias = Sequence[tuple[str, str]]


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

    def __init__(self, routers: _SyncRouters, generation: Generation) -> None:
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
                    if not isinstance(
                        from_rpc(error), NotFound | InvalidArgument
                    ):  # it works, and takes the whole request
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

    def __init__(self, routers: _AsyncRouters, generation: Generation) -> None:
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
                    if not isinstance(
                        from_rpc(error), NotFound | InvalidArgument
                    ):  # it works, and takes the whole request
                        self._routers.turn_away(self._stub)
                if delay_s is None:
                    return
                await asyncio.sleep(delay_s)
                self._call = self._open()
        finally:
            self._call.cancel()


class Client:
    """A connection to a router at "host:port" or "unix:/path"; threads may share it.

    Args:
        address: of one router, or of several that share their verifiers, separated by commas: the others are called
            when one is unavailable.
        max_resumes: how often a generation whose router went away is taken up again where it broke off. The router, or
            another one, has half a minute to come back each time.
        metadata: sent with every call: keys and values for whoever stands before the router, such as an API key.
    """

    def __init__(self, address: str, *, max_resumes: int = 5, metadata: Metadata = ()) -> None:
        self._routers: _SyncRouters = Routers(
            address, lambda name: grpc.insecure_channel(name, options=_OPTIONS), inference_pb2_grpc.InferenceServiceStub
        )
        self._max_resumes = max_resumes
        self._metadata = tuple(metadata)

    def generate(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Stream:
        """Start a generation and stream it. `deadline_s` bounds all of it, resumes included.

        Raises:
            InvalidArgument: if the parameters make no request. All else is raised while iterating.
        """
        options = CallOptions(deadline_s, self._max_resumes, len(self._routers), self._metadata)
        return Stream(self._routers, Generation(build_request(params), options))

    def complete(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Completion:
        """Generate and wait for all of it. Raises TreeserveClientError."""
        with self.generate(deadline_s=deadline_s, **params) as stream:
            for _chunk in stream:
                pass
            return stream.result

    def list_models(self, *, deadline_s: float | None = None) -> list[Model]:
        """The models that can be served now, sorted by name. Raises TreeserveClientError."""
        request = inference_pb2.ListModelsRequest()
        response = self._ask(lambda stub: stub.ListModels(request, timeout=deadline_s, metadata=self._metadata))
        return [Model.from_proto(model) for model in response.models]

    def get_model(self, name: str, *, deadline_s: float | None = None) -> Model:
        """One model. Raises NotFound if no verifier serves it, or another TreeserveClientError."""
        request = inference_pb2.GetModelRequest(name=name)
        response = self._ask(lambda stub: stub.GetModel(request, timeout=deadline_s, metadata=self._metadata))
        return Model.from_proto(response.model)

    def explain(self, request_id: str, *, deadline_s: float | None = None) -> Explanation:
        """What the router that is called now decided about a request, and why; another tells its own part.

        Raises:
            NotFound: if it knows nothing of the request.
            TreeserveClientError: PERMISSION_DENIED where explanations are off, or another failure.
        """
        request = inference_pb2.ExplainRequest(request_id=request_id)
        response = self._ask(lambda stub: stub.Explain(request, timeout=deadline_s, metadata=self._metadata))
        return Explanation.from_proto(response)

    def close(self) -> None:
        """Close the connection; running streams end with Cancelled."""
        for channel in self._routers.channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _ask(self, call: Callable[[_Stub], _T]) -> _T:
        """Call one router after the other until one is available."""
        for tries_left in reversed(range(len(self._routers))):
            stub = self._routers.stub
            try:
                return call(stub)
            except grpc.RpcError as error:
                typed = from_rpc(error)
                if not isinstance(typed, Unavailable) or not tries_left:
                    raise typed from error
                self._routers.turn_away(stub)
        raise AssertionError("there is at least one router")


class AsyncClient:
    """`Client` for asyncio: the same parameters, results and errors. Build it inside the event loop."""

    def __init__(self, address: str, *, max_resumes: int = 5, metadata: Metadata = ()) -> None:
        self._routers: _AsyncRouters = Routers(
            address,
            lambda name: grpc.aio.insecure_channel(name, options=_OPTIONS),
            inference_pb2_grpc.InferenceServiceStub,
        )
        self._max_resumes = max_resumes
        self._metadata = tuple(metadata)

    def generate(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> AsyncStream:
        """Start a generation and stream it; see `Client.generate`."""
        options = CallOptions(deadline_s, self._max_resumes, len(self._routers), self._metadata)
        return AsyncStream(self._routers, Generation(build_request(params), options))

    async def complete(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Completion:
        """Generate and wait for all of it. Raises TreeserveClientError."""
        async with self.generate(deadline_s=deadline_s, **params) as stream:
            async for _chunk in stream:
                pass
            return stream.result

    async def list_models(self, *, deadline_s: float | None = None) -> list[Model]:
        """The models that can be served now, sorted by name. Raises TreeserveClientError."""
        request = inference_pb2.ListModelsRequest()
        response = await self._ask(lambda stub: stub.ListModels(request, timeout=deadline_s, metadata=self._metadata))
        return [Model.from_proto(model) for model in response.models]

    async def get_model(self, name: str, *, deadline_s: float | None = None) -> Model:
        """One model. Raises NotFound if no verifier serves it, or another TreeserveClientError."""
        request = inference_pb2.GetModelRequest(name=name)
        response = await self._ask(lambda stub: stub.GetModel(request, timeout=deadline_s, metadata=self._metadata))
        return Model.from_proto(response.model)

    async def explain(self, request_id: str, *, deadline_s: float | None = None) -> Explanation:
        """What the router that is called now decided about a request; see `Client.explain`."""
        request = inference_pb2.ExplainRequest(request_id=request_id)
        response = await self._ask(lambda stub: stub.Explain(request, timeout=deadline_s, metadata=self._metadata))
        return Explanation.from_proto(response)

    async def close(self) -> None:
        """Close the connection; running streams end with Cancelled."""
        for channel in self._routers.channels:
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _ask(self, call: Callable[[_AsyncStub], Awaitable[_T]]) -> _T:
        """Call one router after the other until one is available."""
        for tries_left in reversed(range(len(self._routers))):
            stub = self._routers.stub
            try:
                return await call(stub)
            except grpc.RpcError as error:
                typed = from_rpc(error)
                if not isinstance(typed, Unavailable) or not tries_left:
                    raise typed from error
                self._routers.turn_away(stub)
        raise AssertionError("there is at least one router")
