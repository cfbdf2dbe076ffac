"""Errors to gRPC statuses with google.rpc details, and back: one table for both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

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

ERROR_DOMAIN = "treeserve"
_INTERNAL_MESSAGE = "internal error"
# Messages and details travel in headers, which peers bound to 8 KiB: there a byte that is not printable takes three.
_MAX_MESSAGE_BYTES = 1000
# For a RESOURCE_EXHAUSTED that names no delay, such as gRPC's own answer to an oversize message.
_DEFAULT_RETRY_AFTER_S = 1.0

_M = TypeVar("_M", bound=Message)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Kind:
    error: type[Exception]
    code: int
    reason: str


# A class stands before its base. The last row of a code is what a status without ErrorInfo becomes.
_KINDS = (
    _Kind(InvalidTreeError, code_pb2.INVALID_ARGUMENT, "INVALID_TREE"),
    _Kind(InvalidArgumentError, code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    _Kind(StaleBaseError, code_pb2.FAILED_PRECONDITION, "STALE_BASE"),
    _Kind(StaleEpochError, code_pb2.ABORTED, "STALE_EPOCH"),
    _Kind(HandshakeError, code_pb2.FAILED_PRECONDITION, "HANDSHAKE"),
    _Kind(UnauthenticatedError, code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED"),
    _Kind(PermissionDeniedError, code_pb2.PERMISSION_DENIED, "PERMISSION_DENIED"),
    _Kind(NotFoundError, code_pb2.NOT_FOUND, "NOT_FOUND"),
    _Kind(OverloadedError, code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED"),
    _Kind(HandedBackError, code_pb2.UNAVAILABLE, "HANDED_BACK"),
    _Kind(UnavailableError, code_pb2.UNAVAILABLE, "UNAVAILABLE"),
    _Kind(TimeoutError, code_pb2.DEADLINE_EXCEEDED, "TIMEOUT"),
)


def to_status(error: BaseException) -> Status:
    """The status of an error. Errors that are not ours become INTERNAL and their message stays here."""
    kind = next((kind for kind in _KINDS if isinstance(error, kind.error)), None)
    if kind is None:
        return Status(code=code_pb2.INTERNAL, message=_INTERNAL_MESSAGE)
    status = Status(code=kind.code, message=_cut(str(error)))
    metadata = {"cause": error.cause} if isinstance(error, OverloadedError) else {}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=kind.reason, domain=ERROR_DOMAIN, metadata=metadata))
    if isinstance(error, InvalidArgumentError):
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(field=error.field, description=_cut(error.reason))
        status.details.add().Pack(bad_request)
    if isinstance(error, OverloadedError):
        delay = Duration()
        delay.FromMicroseconds(round(error.retry_after_s * 1e6))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: Status) -> TreeserveError | TimeoutError:
    """The error a status stands for; a code without a class of its own becomes a plain TreeserveError."""
    info = _detail(status, error_details_pb2.ErrorInfo())
    candidates = [kind for kind in _KINDS if kind.code == status.code]
    kind = next((kind for kind in candidates if kind.reason == info.reason), candidates[-1] if candidates else None)
    if kind is None:
        return TreeserveError(status.message)
    if issubclass(kind.error, InvalidArgumentError):
        return _invalid_argument(kind.error, status)
    if kind.error is OverloadedError:
        return OverloadedError(status.message, _retry_after_s(status), info.metadata.get("cause", "busy"))
    return cast("TreeserveError | TimeoutError", kind.error(status.message))


def error_from_rpc(error: grpc.RpcError) -> TreeserveError | TimeoutError:
    """The error a failed call stands for, from its google.rpc details or, without them, its code."""
    call = cast("Any", error)
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):  # details that contradict the call or do not parse: the code still counts
        status = None
    return from_status(status or Status(code=call.code().value[0], message=call.details() or ""))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call with the error's status; the details travel in grpc-status-details-bin.

    An error that is not ours is logged here, because the peer is not told what it was.
    """
    status = to_status(error)
    if status.code == code_pb2.INTERNAL:
        _log.error("call failed", exc_info=error)
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort returned")


def _cut(text: str) -> str:
    return text.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")


def _detail(status: Status, message: _M) -> _M:
    """`message` filled from the detail of its type, or left empty."""
    for detail in status.details:
        if detail.Is(message.DESCRIPTOR):
            detail.Unpack(message)
            break
    return message


def _invalid_argument(error: type[Exception], status: Status) -> InvalidArgumentError:
    violations = _detail(status, error_details_pb2.BadRequest()).field_violations
    if not violations:
        return InvalidArgumentError("request", status.message)
    if error is InvalidTreeError:
        return InvalidTreeError(violations[0].description)
    return InvalidArgumentError(violations[0].field, violations[0].description)


def _retry_after_s(status: Status) -> float:
    retry = _detail(status, error_details_pb2.RetryInfo())
    return retry.retry_delay.ToMicroseconds() / 1e6 if retry.HasField("retry_delay") else _DEFAULT_RETRY_AFTER_S
