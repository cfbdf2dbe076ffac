"""The clients: every call of the API, sync and async."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar, Unpack

import grpc

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_client.errors import Unavailable, from_rpc
from treeserve_client.explanation import Explanation
from treeserve_client.generation import CallOptions, Generation
from treeserve_client.request import GenerateParams, build_request
from treeserve_client.routers import Routers
from treeserve_client.stream import AsyncRouters, AsyncStream, AsyncStub, Stream, Stub, SyncRouters
from treeserve_client.tls import TLS
from treeserve_client.types import Completion, Model

_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A router that comes back is found within seconds; gRPC's own default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_T = TypeVar("_T")

Metadata: TypeAlias = Sequence[tuple[str, str]]


class Client:
    """A connection to a router at "host:port" or "unix:/path"; threads may share it.

    Args:
        address: of one router, or of several that share their verifiers, separated by commas: the others are called
            when one is unavailable.
        max_resumes: how often a generation whose router went away is taken up again where it broke off. The router, or
            another one, has half a minute to come back each time.
        metadata: sent with every call: keys and values for whoever stands before the router.
        api_key: sent with every call as a bearer token; without `tls` whoever is on the way can read it.
        tls: how to speak TLS; plaintext without.

    Raises:
        OSError: for a file of `tls` that cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        max_resumes: int = 5,
        metadata: Metadata = (),
        api_key: str | None = None,
        tls: TLS | None = None,
    ) -> None:
        def connect(name: str) -> grpc.Channel:
            if credentials is None or tls is None:
                return grpc.insecure_channel(name, options=_OPTIONS)
            return grpc.secure_channel(name, credentials, options=(*_OPTIONS, *tls.options(name)))

        credentials = None if tls is None else tls.credentials()
        self._routers: SyncRouters = Routers(address, connect, inference_pb2_grpc.InferenceServiceStub)
        self._max_resumes = max_resumes
        self._metadata = (*metadata, *_authorization(api_key))

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

    def _ask(self, call: Callable[[Stub], _T]) -> _T:
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

    def __init__(
        self,
        address: str,
        *,
        max_resumes: int = 5,
        metadata: Metadata = (),
        api_key: str | None = None,
        tls: TLS | None = None,
    ) -> None:
        def connect(name: str) -> grpc.aio.Channel:
            if credentials is None or tls is None:
                return grpc.aio.insecure_channel(name, options=_OPTIONS)
            return grpc.aio.secure_channel(name, credentials, options=(*_OPTIONS, *tls.options(name)))

        credentials = None if tls is None else tls.credentials()
        self._routers: AsyncRouters = Routers(address, connect, inference_pb2_grpc.InferenceServiceStub)
        self._max_resumes = max_resumes
        self._metadata = (*metadata, *_authorization(api_key))

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

    async def _ask(self, call: Callable[[AsyncStub], Awaitable[_T]]) -> _T:
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


def _authorization(api_key: str | None) -> Metadata:
    key = (api_key or "").strip()  # one that was read from a file ends in a newline
    return (("authorization", f"Bearer {key}"),) if key else ()
