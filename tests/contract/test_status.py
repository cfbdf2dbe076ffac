"""Error classes across a real loopback call: each arrives with its code and details."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_core.errors import (
    HandedBackError,
    HandshakeError,
    InvalidArgumentError,
    InvalidTreeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    StaleBaseError,
    StaleEpochError,
    TreeserveError,
    UnauthenticatedError,
    UnavailableError,
)
from treeserve_wire.channel import open_channel
from treeserve_wire.server import ServiceServer
from treeserve_wire.status import abort, error_from_rpc, from_status, to_status

ERRORS: Mapping[str, tuple[Exception, grpc.StatusCode]] = {
    "invalid": (InvalidArgumentError("sampling.top_p", "2 is outside (0, 1]"), grpc.StatusCode.INVALID_ARGUMENT),
    "tree": (InvalidTreeError("a tree has at least a root"), grpc.StatusCode.INVALID_ARGUMENT),
    "stale": (StaleBaseError("base 3 is gone"), grpc.StatusCode.FAILED_PRECONDITION),
    "overtaken": (StaleEpochError("a newer turn has begun"), grpc.StatusCode.ABORTED),
    "handshake": (HandshakeError("vocab_size differs"), grpc.StatusCode.FAILED_PRECONDITION),
    "missing": (NotFoundError("no model 'x'"), grpc.StatusCode.NOT_FOUND),
    "full": (OverloadedError("queue is full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    "quota": (OverloadedError("too much", 1.0, "quota_tokens"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    "unknown": (UnauthenticatedError("an API key is needed"), grpc.StatusCode.UNAUTHENTICATED),
    "denied": (PermissionDeniedError("realtime is not due"), grpc.StatusCode.PERMISSION_DENIED),
    "handed_back": (HandedBackError("draining"), grpc.StatusCode.UNAVAILABLE),
    "away": (UnavailableError("no verifier é"), grpc.StatusCode.UNAVAILABLE),
    "late": (TimeoutError("deadline passed"), grpc.StatusCode.DEADLINE_EXCEEDED),
}


class _Aborting(inference_pb2_grpc.InferenceServiceServicer):
    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.GetModelResponse:
        if request.name == "bug":
            await abort(context, KeyError("secret"))
        if request.name == "long":
            await abort(context, InvalidArgumentError("prompt", "🙂" * 100_000))
        if request.name == "plain":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        if request.name == "torn":
            details = (("grpc-status-details-bin", b"\xff\xff not a status"),)
            await context.abort(grpc.StatusCode.NOT_FOUND, "gone", details)
        await abort(context, ERRORS[request.name][0])
        raise AssertionError


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    server = ServiceServer("127.0.0.1:0", "treeserve.inference.v1.InferenceService")
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Aborting(), server.grpc)
    address = await server.start()
    async with open_channel(address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
    await server.drain(0)


async def call(stub: Any, name: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GetModel(inference_pb2.GetModelRequest(name=name))
    return raised.value


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_arrives_as_it_left(stub: Any, name: str) -> None:
    error, code = ERRORS[name]
    arrived = await call(stub, name)
    assert arrived.code() is code
    decoded = error_from_rpc(arrived)
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)
    assert vars(decoded) == vars(error)


async def test_an_unknown_error_is_internal_and_keeps_its_message_to_itself(stub: Any) -> None:
    arrived = await call(stub, "bug")
    assert arrived.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in arrived.debug_error_string() + str(arrived.trailing_metadata())
    assert type(error_from_rpc(arrived)) is TreeserveError


async def test_a_long_message_is_cut_and_keeps_its_status(stub: Any) -> None:
    error = error_from_rpc(await call(stub, "long"))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "prompt" and error.reason.startswith("🙂🙂🙂") and "\ufffd" not in error.reason


async def test_a_status_without_usable_details_goes_by_its_code(stub: Any) -> None:
    assert type(error_from_rpc(await call(stub, "plain"))) is UnavailableError
    torn = error_from_rpc(await call(stub, "torn"))
    assert type(torn) is NotFoundError
    assert str(torn) == "gone"


def _details(error: Exception, kind: Any) -> Any:
    for detail in to_status(error).details:
        message = kind()
        if detail.Unpack(message):
            return message
    raise AssertionError(f"no {kind.__name__}")


def test_details_are_the_google_rpc_ones() -> None:
    violations = _details(ERRORS["invalid"][0], error_details_pb2.BadRequest).field_violations
    assert [(v.field, v.description) for v in violations] == [("sampling.top_p", "2 is outside (0, 1]")]
    retry = _details(ERRORS["full"][0], error_details_pb2.RetryInfo)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)
    assert _details(ERRORS["stale"][0], error_details_pb2.ErrorInfo).reason == "STALE_BASE"
    assert _details(ERRORS["stale"][0], error_details_pb2.ErrorInfo).domain == "treeserve"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.INVALID_ARGUMENT, InvalidArgumentError),
        (code_pb2.FAILED_PRECONDITION, HandshakeError),
        (code_pb2.RESOURCE_EXHAUSTED, OverloadedError),
        (code_pb2.DEADLINE_EXCEEDED, TimeoutError),
        (code_pb2.CANCELLED, TreeserveError),
    ],
)
def test_a_bare_code_is_understood(code: int, kind: type[Exception]) -> None:
    assert type(from_status(Status(code=code, message="m"))) is kind
