"""Requests that cannot be decoded: their callers hear INVALID_ARGUMENT, and nothing is logged.

gRPC's own answer is UNKNOWN with the name of a Python class, and a traceback in the log for whoever wants one there.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.status import abort

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_UNDECODABLE = object()


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Lets handlers, all of them asynchronous, see only requests that could be decoded."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, guarded."""
        handler: Any = await continuation(details)
        return None if handler is None else _guarded(handler)


def _guarded(handler: Any) -> _Handler:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    inner: Callable[[Any, Any], Any] = getattr(handler, kind)
    make: Callable[..., _Handler] = getattr(grpc, f"{kind}_rpc_method_handler")

    async def checked(request: Any, context: Any) -> Any:
        """What the inner handler may see."""
        if handler.request_streaming:
            return _decoded(request, context)
        if request is _UNDECODABLE:
            await _refuse(context)
        return request

    # gRPC treats coroutines and generators differently, and looks which of the two a handler is.
    async def answer(request: Any, context: Any) -> Any:
        return await inner(await checked(request, context), context)

    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in inner(await checked(request, context), context):
            yield response

    guarded = answers if inspect.isasyncgenfunction(inner) else answer
    return make(guarded, _lenient(handler.request_deserializer), handler.response_serializer)


def _lenient(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _UNDECODABLE

    return decode_or_mark


async def _decoded(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _UNDECODABLE:
            await _refuse(context)
        yield request


async def _refuse(context: Any) -> None:
    await abort(context, InvalidArgumentError("request", "is no message of its type"))
