"""The SDK against a scripted InferenceService on loopback: requests, results, errors, and servers that misbehave."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from support.client_runs import Run
from support.fake_router import SEED, TOKENS, FakeRouter, chunk, fail, finished, started

import treeserve_client as sdk
from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2
from treeserve_client.generation import CallOptions, Generation


def test_a_whole_generation(router: FakeRouter, run: Run) -> None:
    router.play(chunk(0, TOKENS[:2]), chunk(2, TOKENS[2:]), finished())
    chunks, stream = run(prompt="p")
    assert [(c.offset, c.token_ids, c.text) for c in chunks] == [
        (0, (10, 11), "<10><11>"),
        (2, (12, 13, 14), "<12><13><14>"),
    ]
    assert stream.started == sdk.Started("drawn-by-router", "m", SEED, 3)
    result = stream.result
    assert result.token_ids == tuple(TOKENS)
    assert result.text == "<10><11><12><13><14>"
    assert result.log_probs[4] == sdk.PositionLogProbs(14, -0.5, ((15, -0.25),))
    assert (result.finish_reason, result.stop_string) == ("stop", "END")
    assert result.usage == sdk.Usage(3, 5)
    assert result.speculation == sdk.SpeculationStats(2, 8, 3, (2, 1))
    assert result.speculation.acceptance_length == 2.5
    assert 0 < result.timing.ttft_ms <= result.timing.e2e_ms


def test_the_request_carries_every_parameter(router: FakeRouter, run: Run) -> None:
    router.play(finished())
    run(
        messages=[{"role": "user", "content": "hi"}], model="m", max_tokens=9, min_tokens=2, stop="END",
        stop_token_ids=[4], ignore_eos=True, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={3: -1.0}, seed=0, top_log_probs=0, speculation=False,
        max_nodes=6, service_class="realtime", ttft_ms=250.0, tpot_ms=50.0, session_id="s", request_id="r",
    )  # fmt: skip
    assert router.requests[0] == inference_pb2.GenerateRequest(
        request_id="r",
        model="m",
        chat=inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        sampling=common_pb2.SamplingParameters(
            temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={3: -1.0}, seed=0, top_log_probs=0,
        ),
        stopping=common_pb2.StoppingCriteria(
            max_tokens=9, min_tokens=2, stop_strings=["END"], stop_token_ids=[4], ignore_eos=True
        ),
        speculation=common_pb2.SpeculationOptions(disabled=True, max_nodes=6),
        service_level=common_pb2.ServiceLevel(
            service_class=common_pb2.SERVICE_CLASS_REALTIME, ttft_ms=250.0, tpot_ms=50.0
        ),
        session_id="s",
    )  # fmt: skip


def test_unset_parameters_stay_unset(router: FakeRouter, run: Run) -> None:
    router.play(finished())
    run(token_ids=[1, 2], top_p=None, stop=None)
    assert router.requests[0].tokens.token_ids == [1, 2]
    assert not router.requests[0].sampling.HasField("top_p")
    assert not router.requests[0].sampling.HasField("seed")


def test_requests_that_make_no_sense_fail_before_they_are_sent(address: str) -> None:
    with sdk.Client(address) as client:
        with pytest.raises(sdk.InvalidArgument, match="exactly one of"):
            client.generate()
        with pytest.raises(sdk.InvalidArgument, match="exactly one of"):
            client.generate(prompt="a", token_ids=[1])
        with pytest.raises(sdk.InvalidArgument, match="out of range"):
            client.generate(prompt="a", top_k=-1)
        with pytest.raises(sdk.InvalidArgument) as raised:
            client.generate(prompt="a", service_class="urgent")  # type: ignore[arg-type]
        assert raised.value.fields == {"service_level.service_class": "'urgent' is unknown"}
        with pytest.raises(TypeError, match="temprature"):
            client.generate(prompt="a", temprature=1.0)  # type: ignore[call-arg]


BAD_REQUEST = error_details_pb2.BadRequest(
    field_violations=[error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="too large")]
)
RETRY = error_details_pb2.RetryInfo()


RETRY.retry_delay.FromMilliseconds(1500)


@pytest.mark.parametrize(
    ("code", "details", "kind", "attributes"),
    [
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            [BAD_REQUEST],
            sdk.InvalidArgument,
            {"fields": {"sampling.top_p": "too large"}},
        ),
        (grpc.StatusCode.NOT_FOUND, [], sdk.NotFound, {}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [RETRY], sdk.ResourceExhausted, {"retry_after_s": 1.5}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [], sdk.ResourceExhausted, {"retry_after_s": None}),
        (grpc.StatusCode.UNAVAILABLE, [], sdk.Unavailable, {}),
        (grpc.StatusCode.CANCELLED, [], sdk.Cancelled, {}),
        (grpc.StatusCode.INTERNAL, [], sdk.Internal, {}),
        (grpc.StatusCode.PERMISSION_DENIED, [], sdk.PermissionDenied, {}),
        (grpc.StatusCode.UNAUTHENTICATED, [], sdk.Unauthenticated, {}),
        (grpc.StatusCode.DATA_LOSS, [], sdk.TreeserveClientError, {}),
    ],
)
def test_errors_are_typed(
    router: FakeRouter, run: Run, code: grpc.StatusCode, details: list[Any], kind: type, attributes: dict[str, Any]
) -> None:
    router.scripts.append(lambda _request: [fail(code, "why", *details)])
    with pytest.raises(sdk.TreeserveClientError, match="why") as raised:
        run(prompt="p")
    assert type(raised.value) is kind
    assert raised.value.code is code
    assert {name: getattr(raised.value, name) for name in attributes} == attributes
    assert len(router.requests) == 1, "nothing is resumed before it started"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([chunk(0, [1, 2]), chunk(3, [4])], "offset 3 where 2 was due"),
        ([chunk(0, [1, 2]), chunk(1, [2])], "offset 1 where 2 was due"),
        ([chunk(0, [1])], "ended before the generation did"),
        ([finished(), chunk(0, [1])], "chunk out of order"),
        ([finished(), finished()], "finished out of order"),
        ([started(inference_pb2.GenerateRequest())], "started out of order"),
        ([inference_pb2.GenerateResponse(finished=inference_pb2.Finished())], "unknown finish reason"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_found_out(
    router: FakeRouter, run: Run, steps: list[Any], message: str
) -> None:
    router.play(*steps)
    with pytest.raises(sdk.Internal, match=message):
        run(prompt="p")


def test_a_chunk_before_started_is_refused(router: FakeRouter, run: Run) -> None:
    router.scripts.append(lambda _request: [chunk(0, [1])])
    with pytest.raises(sdk.Internal, match="out of order"):
        run(prompt="p")


def test_complete_and_models(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, TOKENS), finished())
    with sdk.Client(address) as client:
        assert client.complete(prompt="p").token_ids == tuple(TOKENS)
        assert client.list_models() == [sdk.Model("m", "ab", 300, (2,), 2048, 1, "float32")]
        with pytest.raises(sdk.NotFound, match="'x'"):
            client.get_model("x")


async def test_async_complete_and_models(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, TOKENS), finished())
    async with sdk.AsyncClient(address) as client:
        assert (await client.complete(prompt="p")).token_ids == tuple(TOKENS)
        assert [m.name for m in await client.list_models()] == ["m"]
        with pytest.raises(sdk.NotFound, match="'x'"):
            await client.get_model("x")


def test_an_unreachable_router_is_unavailable() -> None:
    with sdk.Client("127.0.0.1:1") as client, pytest.raises(sdk.Unavailable):
        client.complete(prompt="p")


def test_timing_follows_the_clock() -> None:
    now = [100.0]
    generation = Generation(inference_pb2.GenerateRequest(), CallOptions(), clock=lambda: now[0])
    for at, event in [
        (100.0, started(inference_pb2.GenerateRequest())),
        (100.5, chunk(0, [1, 2])),
        (101.1, chunk(2, [3])),
    ]:
        now[0] = at
        generation.receive(event)
    now[0] = 102.0
    generation.receive(finished())
    assert generation.result is not None
    timing = generation.result.timing
    assert (round(timing.ttft_ms), round(timing.tpot_ms), round(timing.e2e_ms)) == (500, 300, 2000)
