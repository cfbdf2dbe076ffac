"""What the clients send with every call, and the token counts they read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.fake_router import serving

import treeserve_client as sdk
from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc

METADATA = (("x-tenant", "acme"), ("authorization", "Bearer k"))


class NotingRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Ends every generation at once, and notes what came with each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, str]]] = []

    def _note(self, method: str, context: grpc.ServicerContext) -> None:
        self.calls.append((method, {str(key): str(value) for key, value in context.invocation_metadata()}))

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        self._note("Generate", context)
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r", model="m", seed=1))
        usage = inference_pb2.Usage(prompt_tokens=9, completion_tokens=0, cached_tokens=8)
        end = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, usage=usage)
        yield inference_pb2.GenerateResponse(finished=end)

    def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        self._note("ListModels", context)
        return inference_pb2.ListModelsResponse()

    def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:
        self._note("GetModel", context)
        return inference_pb2.GetModelResponse()


@pytest.fixture
def router() -> Iterator[tuple[NotingRouter, str]]:
    servicer = NotingRouter()
    with serving(servicer) as address:
        yield servicer, address


async def _all_calls(address: str) -> sdk.Completion:
    async with sdk.AsyncClient(address, metadata=METADATA) as client:
        await client.list_models()
        await client.get_model("m")
        return await client.complete(prompt="p")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_metadata_goes_with_every_call_and_cached_tokens_are_told(router: tuple[NotingRouter, str], kind: str) -> None:
    servicer, address = router
    if kind == "sync":
        with sdk.Client(address, metadata=METADATA) as client:
            client.list_models()
            client.get_model("m")
            completion = client.complete(prompt="p")
    else:
        completion = asyncio.run(_all_calls(address))
    assert [method for method, _ in servicer.calls] == ["ListModels", "GetModel", "Generate"]
    assert all(metadata.items() >= dict(METADATA).items() for _, metadata in servicer.calls)
    assert completion.usage == sdk.Usage(9, 0, 8)


def test_a_key_comes_without_the_newline_of_its_file(router: tuple[NotingRouter, str]) -> None:
    servicer, address = router
    with sdk.Client(address, api_key="k\n") as client:
        client.list_models()
    with sdk.Client(address, api_key=" \n") as client:
        client.list_models()
    assert [metadata.get("authorization") for _, metadata in servicer.calls] == ["Bearer k", None]
