"""Who calls: one check before every RPC and every HTTP route, at the only place that decides it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from treeserve_core.errors import PermissionDeniedError, TreeserveError, UnauthenticatedError
from treeserve_router.admission import tenant_of
from treeserve_router.auth import ApiKey, Keyring
from treeserve_router.openai_response import error_response
from treeserve_router.qos import ServiceLevels
from treeserve_wire.status import abort

# What probes ask. Everything else asks who calls.
OPEN_RPCS = f"/{health.SERVICE_NAME}/"
OPEN_PATHS = ("/healthz", "/readyz")

# The values of a header, or of metadata, by its lower-case name.
Values = Callable[[str], Sequence[str]]
# What comes with an RPC, if anything does.
Metadata = Iterable[tuple[str, str | bytes]] | None

_NO_KEY = "an API key is needed, as in `authorization: Bearer KEY`"


@dataclass(frozen=True)
class Caller:
    """Who makes a call.

    Attributes:
        tenant: whom it is for, as in `Ask`.
        levels: what its requests are promised.
        key_name: of its API key; empty without one.
    """

    tenant: str | None
    levels: ServiceLevels
    key_name: str = ""


_caller: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Who makes the call that runs. Raises LookupError where it did not come through the front door."""
    return _caller.get()


def values_in(metadata: Metadata) -> Values:
    """The text that comes with an RPC, by name."""
    return lambda key: [value for name, value in metadata or () if name == key and isinstance(value, str)]


class FrontDoor:
    """Lets callers in.

    With keys, a call needs one, and it says who calls; only trusted keys speak for other tenants and say what a request
    is due. Without keys, a gateway's headers say it.

    Args:
        levels: what requests are promised where there are no keys.
        tenant_header: in which a gateway names the tenant; empty for none.
        on_refusal: told why a call was refused.
    """

    def __init__(
        self,
        levels: ServiceLevels,
        tenant_header: str,
        keyring: Keyring | None,
        on_refusal: Callable[[TreeserveError], None],
    ) -> None:
        self._levels = levels
        self._tenant_header = tenant_header
        self._keyring = keyring
        self._on_refusal = on_refusal

    def enter(self, values: Values) -> None:
        """Make the caller known to the rest of this call. Raises TreeserveError if it may not call."""
        try:
            caller = self.identify(values)
        except TreeserveError as error:
            self._on_refusal(error)
            raise
        _caller.set(caller)
        if caller.key_name:
            structlog.contextvars.bind_contextvars(api_key=caller.key_name)

    def identify(self, values: Values) -> Caller:
        """Who calls.

        Raises:
            UnauthenticatedError: without a key that is known, where there are keys.
            PermissionDeniedError: for a key that says what only trusted ones may.
        """
        if self._keyring is None:
            return Caller(tenant_of(self._tenant_header, values), self._levels)
        key = _known(self._keyring, values)
        if key.trusted:
            tenant = tenant_of(self._tenant_header, values) if self._stated(self._tenant_header, values) else key.tenant
            return Caller(tenant, replace(self._levels, trust_clients=True), key.name)
        if any(tenant != key.tenant for tenant in self._stated(self._tenant_header, values)):
            raise PermissionDeniedError(f"{self._tenant_header}: the API key is another tenant's")
        if self._stated(self._levels.class_header, values):
            raise PermissionDeniedError(f"{self._levels.class_header}: only trusted API keys say what a request is due")
        return Caller(key.tenant, replace(self._levels, trust_clients=False), key.name)

    @staticmethod
    def _stated(header: str, values: Values) -> Sequence[str]:
        return values(header) if header else ()


def _known(keyring: Keyring, values: Values) -> ApiKey:
    given = values("authorization")
    scheme, _, secret = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        raise UnauthenticatedError(_NO_KEY)
    key = keyring.find(secret.strip())
    if key is None:
        raise UnauthenticatedError("the API key is not known here")
    return key


class GrpcDoor(grpc.aio.ServerInterceptor):
    """The front door of a gRPC server: every call but those of health, reflection and unknown methods included."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Go on, or refuse."""
        if not details.method.startswith(OPEN_RPCS):
            try:
                self._door.enter(values_in(details.invocation_metadata))
            except TreeserveError as error:
                return _refusal(error)
        return await continuation(details)


def _refusal(error: TreeserveError) -> grpc.RpcMethodHandler[Any, Any]:
    """Ends a call of any kind before it is read."""

    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class HttpDoor:
    """The front door of an ASGI application: every path but those of health."""

    def __init__(self, app: ASGIApp, door: FrontDoor) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on, or refuse."""
        if scope["path"] not in OPEN_PATHS:
            try:
                self._door.enter(Headers(scope=scope).getlist)
            except TreeserveError as error:
                answer = error_response(error)
                await JSONResponse(answer.body, answer.status, answer.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)
