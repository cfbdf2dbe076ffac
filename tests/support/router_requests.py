"""Requests to a router over gRPC, and what its refusals say."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb


def request(max_tokens: int = 12, prompt: str = "one two", **fields: Any) -> pb.GenerateRequest:
    """A request for up to `max_tokens`; `stopping` says what else ends it."""
    stopping = fields.pop("stopping", {})
    made = pb.GenerateRequest(prompt=prompt, **fields)
    made.stopping.MergeFrom(common.StoppingCriteria(max_tokens=max_tokens, **stopping))
    return made


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The error in which a stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def detail(error: grpc.aio.AioRpcError, message: Any) -> Any:
    """`message`, filled with the error's detail of its type."""
    status = rpc_status.from_call(error)
    assert status is not None
    for packed in status.details:
        if packed.Unpack(message):
            return message
    raise AssertionError(f"no {message.DESCRIPTOR.name} in {status}")
