"""The SDK with several routers: which one it calls, and what it takes up again at the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from support.fake_router import SEED, TOKENS, FakeRouter, Unreachable, chunk, fail, finished, serving

import treeserve_client as sdk
from treeserve.inference.v1 import inference_pb2
from treeserve_client.generation import CallOptions, Generation

DOWN = "127.0.0.1:1"


@pytest.fixture
def routers() -> Iterator[tuple[FakeRouter, FakeRouter, str]]:
    """Two routers, and the addresses of both."""
    one, two = FakeRouter(), FakeRouter()
    with ExitStack() as stack:
        yield one, two, ",".join(stack.enter_context(serving(router)) for router in (one, two))


def complete(addresses: str, **params: Any) -> sdk.Completion:
    with sdk.Client(addresses) as client:
        return client.complete(**params)


def complete_async(addresses: str, **params: Any) -> sdk.Completion:
    async def run() -> sdk.Completion:
        async with sdk.AsyncClient(addresses) as client:
            return await client.complete(**params)

    return asyncio.run(run())


Complete = Callable[..., sdk.Completion]
both_clients = pytest.mark.parametrize("complete", [complete, complete_async])


@both_clients
def test_a_stream_goes_on_at_the_next_router(routers: tuple[FakeRouter, FakeRouter, str], complete: Complete) -> None:
    one, two, addresses = routers
    one.play(chunk(0, TOKENS[:2]), fail(grpc.StatusCode.UNAVAILABLE, "the router shuts down"))
    two.play(chunk(2, TOKENS[2:]), finished())
    done = complete(addresses, prompt="p", temperature=1.0)
    assert list(done.token_ids) == TOKENS
    assert list(two.requests[0].generated_token_ids) == TOKENS[:2]
    assert two.requests[0].sampling.seed == SEED
    assert len(one.requests) == 1


@both_clients
def test_one_that_is_down_costs_a_new_call_nothing(complete: Complete) -> None:
    router = FakeRouter()
    router.play(chunk(0, TOKENS), finished())
    with serving(router) as address:
        assert list(complete(f"{DOWN}, {address}", prompt="p").token_ids) == TOKENS


@both_clients
def test_each_is_tried_once_before_a_call_has_started(
    routers: tuple[FakeRouter, FakeRouter, str], complete: Complete
) -> None:
    one, two, addresses = routers
    for router in (one, two):
        router.scripts.append(lambda _request: [fail(grpc.StatusCode.UNAVAILABLE, "no verifier")])
    with pytest.raises(sdk.Unavailable, match="no verifier"):
        complete(addresses, prompt="p")
    assert (len(one.requests), len(two.requests)) == (1, 1)


@both_clients
def test_other_errors_are_not_taken_to_the_next_router(
    routers: tuple[FakeRouter, FakeRouter, str], complete: Complete
) -> None:
    one, two, addresses = routers
    one.scripts.append(lambda _request: [fail(grpc.StatusCode.INVALID_ARGUMENT, "no")])
    with pytest.raises(sdk.InvalidArgument):
        complete(addresses, prompt="p")
    assert not two.requests


@both_clients
def test_a_resume_that_finds_the_next_router_full_waits_its_turn(
    routers: tuple[FakeRouter, FakeRouter, str], complete: Complete
) -> None:
    one, two, addresses = routers
    one.play(chunk(0, TOKENS[:2]), fail(grpc.StatusCode.UNAVAILABLE, "gone"))
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=50_000_000))
    two.scripts.append(lambda _request: [fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry)])
    one.play(chunk(2, TOKENS[2:]), finished())
    assert list(complete(addresses, prompt="p").token_ids) == TOKENS


def test_later_calls_go_where_the_last_one_went(routers: tuple[FakeRouter, FakeRouter, str]) -> None:
    _, two, addresses = routers
    with sdk.Client(f"{DOWN},{addresses.split(',')[1]}") as client:
        for _ in range(2):
            two.play(chunk(0, TOKENS), finished())
            client.complete(prompt="p")
        assert [model.name for model in client.list_models()] == ["m"]
        with pytest.raises(sdk.NotFound):
            client.get_model("other")
    assert len(two.requests) == 2


async def test_listing_models_turns_to_the_next_router(routers: tuple[FakeRouter, FakeRouter, str]) -> None:
    address = routers[2].split(",")[0]
    async with sdk.AsyncClient(f"{DOWN},{address}") as client:
        assert [model.name for model in await client.list_models()] == ["m"]
    async with sdk.AsyncClient(f"{DOWN},127.0.0.1:2") as client:
        with pytest.raises(sdk.Unavailable):
            await client.list_models()


def test_an_empty_list_of_addresses_is_refused() -> None:
    with pytest.raises(sdk.InvalidArgument, match="address"):
        sdk.Client(" , ")


def test_all_routers_are_tried_at_once_then_there_is_a_pause() -> None:
    generation = Generation(inference_pb2.GenerateRequest(), CallOptions(routers=3), clock=lambda: 0.0)
    generation.receive(inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r")))
    delays = [generation.resume_delay_s(Unreachable()) for _ in range(9)]
    assert delays == [0, 0, 0.1, 0, 0, 0.2, 0, 0, 0.4]
