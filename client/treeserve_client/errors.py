"""What a call may raise: one class for each status the API documents."""
# The classes carry the names of gRPC's status codes.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

_M = TypeVar("_M", bound=Message)


class TreeserveClientError(Exception):
    """Base of all errors of a call. `code` is the status."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


class InvalidArgument(TreeserveClientError):
    """The request is outside the API's limits. `fields` gives the reason for each field at fault."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})

    @classmethod
    def of(cls, field: str, reason: str) -> InvalidArgument:
        """The error of one field."""
        return cls(f"{field}: {reason}", {field: reason})


class Unauthenticated(TreeserveClientError):
    """The router wants an API key that it knows."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TreeserveClientError):
    """The caller may not ask for this, for example a more urgent class or tighter targets than are due."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(TreeserveClientError):
    """No verifier serves the model."""

    code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(TreeserveClientError):
    """The service is full, or the request too large. `retry_after_s` is None if trying again will not help."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(TreeserveClientError):
    """The router cannot be reached or has no verifier."""

    code = grpc.StatusCode.UNAVAILABLE


class Aborted(TreeserveClientError):
    """A newer turn of the same session began before this one could run."""

    code = grpc.StatusCode.ABORTED


class DeadlineExceeded(TreeserveClientError):
    """`deadline_s` passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(TreeserveClientError):
    """The call was cancelled by someone other than its owner."""

    code = grpc.StatusCode.CANCELLED


class Internal(TreeserveClientError):
    """The service failed or broke the protocol."""

    code = grpc.StatusCode.INTERNAL


_PLAIN = {
    kind.code: kind
    for kind in (
        Unauthenticated,
        PermissionDenied,
        NotFound,
        Unavailable,
        Aborted,
        DeadlineExceeded,
        Cancelled,
        Internal,
    )
}


def from_rpc(error: grpc.RpcError) -> TreeserveClientError:
    """The typed error of a failed call."""
    call = cast("Any", error)
    code, message = call.code(), call.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        violations = _detail(call, BadRequest()).field_violations
        return InvalidArgument(message, {v.field: v.description for v in violations})
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry = _detail(call, RetryInfo())
        seconds = retry.retry_delay.ToMicroseconds() / 1e6 if retry.HasField("retry_delay") else None
        return ResourceExhausted(message, seconds)
    typed = _PLAIN.get(code, TreeserveClientError)(message)
    typed.code = code
    return typed


def _detail(call: Any, message: _M) -> _M:
    """`message` filled from the call's google.rpc detail of its type, or left empty."""
    try:
        status = rpc_status.from_call(call) or Status()
    except (ValueError, DecodeError):  # details that contradict the call or do not parse
        status = Status()
    for detail in status.details:
        if detail.Is(message.DESCRIPTOR):
            detail.Unpack(message)
    return message
