"""What the router refuses, by field, and what it says of its models and health."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_verifier import FakeVerifier
from support.router_requests import detail, refusal, request
from support.router_rig import RouterRig
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceStub
from treeserve_text.tokenizer import Tokenizer

S, P = common.SamplingParameters, common.StoppingCriteria
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("request_id", {"request_id": "spaces are not allowed"}),
    ("request_id", {"request_id": "x" * 129}),
    ("session_id", {"session_id": "x" * 129}),
    ("input", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "z" * 300}),
    ("chat.messages", {"chat": pb.ChatInput()}),
    ("chat.messages", {"chat": pb.ChatInput(messages=[pb.ChatMessage(role="user")] * 1025)}),
    ("chat.messages[0].role", {"chat": pb.ChatInput(messages=[pb.ChatMessage(role="tool", content="x")])}),
    ("tokens.token_ids", {"tokens": pb.TokenInput()}),
    ("tokens.token_ids", {"tokens": pb.TokenInput(token_ids=[100000])}),
    ("sampling.temperature", {"sampling": S(temperature=101)}),
    ("sampling.temperature", {"sampling": S(temperature=float("nan"))}),
    ("sampling.top_k", {"sampling": S(top_k=100000)}),
    ("sampling.top_p", {"sampling": S(top_p=0)}),
    ("sampling.min_p", {"sampling": S(min_p=2)}),
    ("sampling.repetition_penalty", {"sampling": S(repetition_penalty=0)}),
    ("sampling.presence_penalty", {"sampling": S(presence_penalty=3)}),
    ("sampling.frequency_penalty", {"sampling": S(frequency_penalty=-3)}),
    ("sampling.logit_bias", {"sampling": S(logit_bias={100000: 1.0})}),
    ("sampling.logit_bias", {"sampling": S(logit_bias=dict.fromkeys(range(1025), 1.0))}),
    ("sampling.logit_bias[3]", {"sampling": S(logit_bias={3: 101.0})}),
    ("sampling.top_log_probs", {"sampling": S(top_log_probs=21)}),
    ("sampling.seed", {"sampling": S(temperature=1), "generated_token_ids": [1]}),
    ("stopping.max_tokens", {"stopping": P(max_tokens=256)}),
    ("stopping.max_tokens", {"stopping": P(max_tokens=2**32 - 1)}),
    ("stopping.min_tokens", {"stopping": P(max_tokens=2, min_tokens=3)}),
    ("stopping.min_tokens", {"stopping": P(min_tokens=256)}),
    ("stopping.stop_strings", {"stopping": P(stop_strings=["x"] * 17)}),
    ("stopping.stop_strings", {"stopping": P(stop_strings=[""])}),
    ("stopping.stop_strings", {"stopping": P(stop_strings=["x" * 257])}),
    ("stopping.stop_token_ids", {"stopping": P(stop_token_ids=[1] * 65)}),
    ("stopping.stop_token_ids", {"stopping": P(stop_token_ids=[100000])}),
    ("service_level.ttft_ms", {"service_level": common.ServiceLevel(ttft_ms=-1)}),
    ("service_level.tpot_ms", {"service_level": common.ServiceLevel(tpot_ms=float("inf"))}),
    ("service_level.service_class", {"service_level": common.ServiceLevel(service_class=9)}),  # type: ignore[arg-type]
    ("generated_token_ids", {"generated_token_ids": [100000]}),
    ("generated_token_ids", {"stopping": P(max_tokens=1), "generated_token_ids": [1, 2]}),
]


class TestRefusals:
    async def test_every_field_is_named(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        for field, fields in REFUSALS:
            inputs = {"chat", "tokens", "prompt"} & fields.keys()
            bad = pb.GenerateRequest(**({} if inputs else {"prompt": "one two"}), **fields)
            error = await refusal(rig.stub.Generate(bad))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (field, fields)
            violation = detail(error, error_details_pb2.BadRequest()).field_violations[0]
            assert violation.field == field, fields
            assert violation.description
        assert verifier.submits == []

    async def test_the_longest_input_is_judged_by_its_tokens(self, rig: RouterRig) -> None:
        async with grpc.aio.insecure_channel(rig.grpc) as channel:  # without our own limit on what is sent
            for field, fields in (
                ("prompt", {"prompt": "a" * (1 << 20)}),
                ("tokens.token_ids", {"tokens": pb.TokenInput(token_ids=[250] * (1 << 20))}),
            ):
                error = await refusal(InferenceServiceStub(channel).Generate(pb.GenerateRequest(**fields)))
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
                violation = detail(error, error_details_pb2.BadRequest()).field_violations[0]
                assert violation.field == field and "context window" in violation.description

    async def test_an_unknown_model(self, rig: RouterRig) -> None:
        error = await refusal(rig.stub.Generate(request(model="other")))
        assert error.code() == grpc.StatusCode.NOT_FOUND

    async def test_models(self, rig: RouterRig, tokenizer: Tokenizer) -> None:
        listed = (await rig.stub.ListModels(pb.ListModelsRequest())).models
        assert [(m.identity.name, m.max_context_tokens, m.verifiers, m.dtype) for m in listed] == [
            ("tiny", 256, 1, "float32")
        ]
        assert listed[0].identity.tokenizer_hash == tokenizer.hash
        assert (await rig.stub.GetModel(pb.GetModelRequest(name="tiny"))).model == listed[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.GetModel(pb.GetModelRequest(name="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND

    async def test_health_follows_the_verifiers(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        health = health_pb2_grpc.HealthStub(rig.channel)
        states: list[int] = []

        async def watch() -> None:
            async for response in health.Watch(health_pb2.HealthCheckRequest()):
                states.append(response.status)

        watching = asyncio.create_task(watch())
        await until(lambda: health_pb2.HealthCheckResponse.SERVING in states)
        await verifier.kill()
        await until(lambda: states[-1] == health_pb2.HealthCheckResponse.NOT_SERVING)
        watching.cancel()
