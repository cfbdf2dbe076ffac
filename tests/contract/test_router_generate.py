"""Generate against scripted verifiers: what the router promises about every stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random, recite
from support.router_rig import Collected, RouterRig, load_tokenizer, running_router
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceStub
from treeserve_core.errors import InvalidArgumentError, OverloadedError, UnavailableError
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.channel import open_channel

UNICODE = "naïve café — 東京 🙂🙂 end"
ANY_TOKEN = pseudo_random(2, 250)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(tmp_path)


@pytest.fixture
def verifier(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", ANY_TOKEN)


@pytest.fixture
def other_verifier(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/b.sock", ANY_TOKEN)


@pytest.fixture
async def rig(tokenizer: Tokenizer, tmp_path: Path, verifier: FakeVerifier) -> AsyncIterator[RouterRig]:
    async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
        yield rig


def request(max_tokens: int = 12, prompt: str = "one two", **fields: Any) -> pb.GenerateRequest:
    stopping = fields.pop("stopping", {})
    made = pb.GenerateRequest(prompt=prompt, **fields)
    made.stopping.MergeFrom(common.StoppingCriteria(max_tokens=max_tokens, **stopping))
    return made


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def detail(error: grpc.aio.AioRpcError, message: Any) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None
    for packed in status.details:
        if packed.Unpack(message):
            return message
    raise AssertionError(f"no {message.DESCRIPTOR.name} in {status}")


class TestStream:
    async def test_tokens_text_usage_and_stats_agree(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        prompt_ids = tokenizer.encode("one two")
        seen = await rig.generate(request(40, sampling=common.SamplingParameters(seed=7)))
        submitted = verifier.submits[0]
        expected: list[int] = []
        while len(expected) < 40:
            expected.append(ANY_TOKEN(submitted, expected))
        assert list(submitted.prompt_token_ids) == prompt_ids
        assert seen.token_ids == expected
        assert seen.text == tokenizer.decode(expected)
        assert seen.chunks[0].offset == 0
        assert seen.started == pb.Started(
            request_id=seen.started.request_id,
            model="tiny",
            seed=7,
            prompt_tokens=len(prompt_ids),
            acceptance=common.ACCEPTANCE_RULE_REPLAY,
        )
        assert seen.finished.reason == common.FINISH_REASON_LENGTH
        assert seen.finished.usage == pb.Usage(prompt_tokens=len(prompt_ids), completion_tokens=40)
        assert seen.finished.speculation.steps == 40
        assert seen.finished.speculation.drafted == 80
        assert rig.metric("gen_ai_server_time_to_first_token_seconds_count", service_class="standard") == 1

    @pytest.mark.parametrize("tokens_per_frame", [1, 2, 5, 50])
    async def test_text_does_not_depend_on_frames(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, tokens_per_frame: int
    ) -> None:
        ids = tokenizer.encode(UNICODE)
        verifier.script = recite(ids)
        verifier.tokens_per_frame = tokens_per_frame
        seen = await rig.generate(request(len(ids)))
        assert seen.text == UNICODE
        assert seen.token_ids == ids
        assert "�" not in "".join(chunk.text for chunk in seen.chunks)

    @pytest.mark.parametrize("tokens_per_frame", [1, 3, 50])
    async def test_stop_string_over_token_boundaries(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, tokens_per_frame: int
    ) -> None:
        ids = [token_id for char in "aab aSTOP here" for token_id in tokenizer.encode(char)]
        verifier.script = recite(ids)
        verifier.tokens_per_frame = tokens_per_frame
        seen = await rig.generate(
            request(
                50, stopping={"stop_strings": ["nowhere", "STOP"]}, sampling=common.SamplingParameters(top_log_probs=0)
            )
        )
        kept = len("aab a")
        assert seen.text == "aab a"
        assert seen.token_ids == ids[:kept]
        assert [position.chosen.token_id for position in seen.log_probs] == ids[:kept]
        assert seen.finished.usage.completion_tokens == kept
        assert seen.finished.reason == common.FINISH_REASON_STOP
        assert seen.finished.stop_string == "STOP"
        assert seen.finished.speculation.steps > 0

    async def test_held_back_tokens_come_out_when_the_length_is_reached(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        ids = [token_id for char in "abST" for token_id in tokenizer.encode(char)]
        verifier.script = recite(ids)
        seen = await rig.generate(
            request(4, stopping={"stop_strings": ["STOP"]}, sampling=common.SamplingParameters(top_log_probs=0))
        )
        assert (seen.text, seen.token_ids, len(seen.log_probs)) == ("abST", ids, 4)
        assert seen.finished.reason == common.FINISH_REASON_LENGTH

    async def test_eos_is_released_without_text(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        eos = tokenizer.eos_token_ids[0]
        ids = [*tokenizer.encode("two"), eos]
        verifier.script = recite(ids)
        seen = await rig.generate(request(50))
        assert (seen.text, seen.token_ids) == ("two", ids)
        assert seen.finished.reason == common.FINISH_REASON_STOP

    async def test_chat_and_token_inputs(self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
        chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="one")])
        await rig.generate(pb.GenerateRequest(chat=chat, stopping=common.StoppingCriteria(max_tokens=1)))
        assert list(verifier.submits[0].prompt_token_ids) == tokenizer.encode("user: one\nassistant: ")
        tokens = pb.TokenInput(token_ids=[5, 6, 7])
        seen = await rig.generate(pb.GenerateRequest(tokens=tokens, stopping=common.StoppingCriteria(max_tokens=1)))
        assert list(verifier.submits[1].prompt_token_ids) == [5, 6, 7]
        assert seen.finished.usage.prompt_tokens == 3

    async def test_max_tokens_zero_fills_the_window(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        seen = await rig.generate(request(0))
        assert seen.finished.usage.prompt_tokens + seen.finished.usage.completion_tokens == 256
        assert verifier.submits[0].stopping.max_tokens == seen.finished.usage.completion_tokens

    async def test_a_seed_is_drawn_and_gives_the_same_tokens_again(self, rig: RouterRig) -> None:
        first = await rig.generate(request())
        second = await rig.generate(request())
        again = await rig.generate(request(sampling=common.SamplingParameters(seed=first.started.seed)))
        assert first.started.seed != second.started.seed
        assert first.token_ids != second.token_ids
        assert again.token_ids == first.token_ids

    async def test_options_reach_the_verifier(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        await rig.generate(
            request(
                3,
                sampling=common.SamplingParameters(temperature=0.5, top_k=9, logit_bias={4: 2.0}, seed=2**64 - 1),
                speculation=common.SpeculationOptions(disabled=True),
                service_level=common.ServiceLevel(service_class=common.SERVICE_CLASS_REALTIME, ttft_ms=50),
            )
        )
        submitted = verifier.submits[0]
        assert submitted.sampling.temperature == 0.5
        assert submitted.sampling.top_k == 9
        assert submitted.sampling.seed == 2**64 - 1
        assert dict(submitted.sampling.logit_bias) == {4: 2.0}
        assert submitted.speculation.disabled
        assert submitted.service_level.service_class == common.SERVICE_CLASS_REALTIME
        assert submitted.service_level.ttft_ms == 50


class TestResume:
    @pytest.mark.parametrize("kept", [1, 4, 9, 12])
    async def test_goes_on_where_the_client_is(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, kept: int
    ) -> None:
        whole = await rig.generate(request())
        rest = await rig.generate(
            request(
                sampling=common.SamplingParameters(seed=whole.started.seed), generated_token_ids=whole.token_ids[:kept]
            )
        )
        assert rest.token_ids == whole.token_ids[kept:]
        assert all(chunk.offset >= kept for chunk in rest.chunks)
        assert rest.finished.usage == whole.finished.usage
        assert rest.finished.reason == whole.finished.reason
        assert len(verifier.submits) == (2 if kept < 12 else 1)

    async def test_text_continues_inside_a_character_and_a_possible_stop_string(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        ids = [token_id for char in "aSTé🙂STb" for token_id in tokenizer.encode(char)]
        verifier.script = recite(ids)
        options: dict[str, Any] = {"stopping": {"stop_strings": ["STOP"]}}
        whole = await rig.generate(request(len(ids), **options))
        assert whole.text == "aSTé🙂STb"
        for kept in range(1, len(ids)):
            rest = await rig.generate(request(len(ids), generated_token_ids=ids[:kept], **options))
            assert rest.token_ids == ids[kept:]
            assert rest.text == whole.text[len(tokenizer.decode(ids[:kept]).rstrip("�")) :]

    @pytest.mark.parametrize("length", range(1, 10))
    async def test_a_client_that_resumes_after_any_chunk_reads_the_same_text(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, length: int
    ) -> None:
        token_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        verifier.script = recite([token_of[bytes([byte])] for byte in b"a\xc3\xc3b\xf0\x9f\xe0\x82\xc3"])
        interrupted = request(length)
        whole = await rig.generate(interrupted)
        for received in range(len(whole.chunks) + 1):
            chunks = whole.chunks[:received]
            interrupted.generated_token_ids[:] = [token_id for chunk in chunks for token_id in chunk.token_ids]
            rest = await rig.generate(interrupted)
            assert "".join(chunk.text for chunk in chunks) + rest.text == whole.text
            assert [*interrupted.generated_token_ids, *rest.token_ids] == whole.token_ids
            assert rest.finished.usage == whole.finished.usage

    async def test_a_complete_output_ends_at_once(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        eos = tokenizer.eos_token_ids[0]
        seen = await rig.generate(request(generated_token_ids=[5, eos]))
        assert (seen.finished.reason, seen.token_ids) == (common.FINISH_REASON_STOP, [])
        assert seen.finished.usage.completion_tokens == 2
        assert verifier.submits == []

    async def test_a_newer_call_takes_over(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        verifier.hold_at = 3
        older = asyncio.create_task(rig.generate(request(request_id="same")))
        await until(lambda: verifier.frames == 3)
        verifier.hold_at = 6
        newer = asyncio.create_task(rig.generate(request(request_id="same")))
        ended = await older
        assert ended.finished.reason == common.FINISH_REASON_CANCELLED
        assert ended.finished.usage.completion_tokens == len(ended.token_ids)
        await until(lambda: len(verifier.cancelled) == 1)
        verifier.hold_at = None
        assert len((await newer).token_ids) == 12


class TestFailures:
    async def test_cancelling_reaches_the_verifier(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        verifier.hold_at = 3
        call = rig.stub.Generate(request())
        await call.read()
        await until(lambda: verifier.frames == 3)
        call.cancel()
        await until(lambda: verifier.cancelled == [verifier.submits[0].handle])
        await until(lambda: rig.metric("treeserve_router_active_requests") == 0)

    async def test_the_deadline_ends_the_stream_and_the_sequence(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        verifier.hold_at = 3
        error = await refusal(rig.stub.Generate(request(), timeout=0.3))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(verifier.cancelled) == 1)

    @pytest.mark.parametrize("tokens_per_frame", [1, 4])
    async def test_death_of_a_verifier_leaves_no_trace(
        self,
        tmp_path: Path,
        tokenizer: Tokenizer,
        verifier: FakeVerifier,
        other_verifier: FakeVerifier,
        tokens_per_frame: int,
    ) -> None:
        both = [verifier, other_verifier]
        async with fake_verifiers(*both), running_router(tmp_path, tokenizer, both) as rig:
            sampling = common.SamplingParameters(seed=3, top_log_probs=0)
            undisturbed = await rig.generate(request(60, sampling=sampling))
            for each in both:
                each.submits.clear()
                each.tokens_per_frame = tokens_per_frame
                each.hold_at = 20
            running = asyncio.create_task(rig.generate(request(60, sampling=sampling)))
            await until(lambda: verifier.submits or other_verifier.submits)
            victim, heir = both if verifier.submits else reversed(both)
            await until(lambda: rig.metric("treeserve_router_output_tokens_total") >= 70)
            await victim.kill()
            await until(lambda: heir.submits)
            heir.hold_at = None
            disturbed = await running
            replayed = list(heir.submits[0].generated_token_ids)
            assert replayed == undisturbed.token_ids[: len(replayed)]
            assert len(replayed) >= 10
            assert heir.submits[0].sampling.seed == 3
            assert disturbed.token_ids == undisturbed.token_ids
            assert disturbed.text == undisturbed.text
            assert disturbed.log_probs == undisturbed.log_probs
            assert disturbed.finished.usage == undisturbed.finished.usage
            assert rig.metric("treeserve_router_replays_total") == 1

    async def test_a_restarted_verifier_takes_its_sequences_back(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        verifier.hold_at = 5
        running = asyncio.create_task(rig.generate(request(sampling=common.SamplingParameters(seed=1))))
        await until(lambda: verifier.frames == 5)
        await verifier.kill()
        verifier.hold_at = None
        await verifier.start()
        seen = await running
        assert len(seen.token_ids) == 12
        assert [len(m.generated_token_ids) for m in verifier.submits] == [0, 5]

    async def test_a_verifier_that_hands_back_its_sequence_is_replayed(
        self, rig: RouterRig, verifier: FakeVerifier
    ) -> None:
        verifier.refuse = UnavailableError("draining")
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: len(verifier.submits) >= 2)
        verifier.refuse = None
        assert len((await running).token_ids) == 12

    @pytest.mark.parametrize(
        ("refuse", "code"),
        [
            (UnavailableError("gone"), grpc.StatusCode.UNAVAILABLE),
            (OverloadedError("full", 0.01), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (InvalidArgumentError("sampling.top_k", "is odd"), grpc.StatusCode.INVALID_ARGUMENT),
        ],
    )
    async def test_a_verifier_that_always_refuses(
        self, rig: RouterRig, verifier: FakeVerifier, refuse: Any, code: grpc.StatusCode
    ) -> None:
        verifier.refuse = refuse
        error = await refusal(rig.stub.Generate(request()))
        assert error.code() == code
        assert len(verifier.submits) == (1 if code == grpc.StatusCode.INVALID_ARGUMENT else 6)

    async def test_tokens_that_do_not_continue_the_output_are_not_shown(
        self, rig: RouterRig, verifier: FakeVerifier
    ) -> None:
        vocab_size = verifier.tokenizer.vocab_size

        def script(message: Any, output: list[int]) -> int:
            broken = len(output) == 4 and not message.generated_token_ids
            return vocab_size if broken else ANY_TOKEN(message, output)

        verifier.script = script
        seen = await rig.generate(request(12, sampling=common.SamplingParameters(seed=5)))
        verifier.script = ANY_TOKEN
        assert seen.token_ids == (await rig.generate(request(12, sampling=common.SamplingParameters(seed=5)))).token_ids
        assert len(verifier.cancelled) == 1

    async def test_a_slow_reader_holds_up_nobody(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        slow = rig.stub.Generate(request(200))
        await slow.read()
        seen = await rig.generate(request(200))
        assert len(seen.token_ids) == 200
        rest = Collected(started=pb.Started())
        while (response := await slow.read()) is not grpc.aio.EOF:
            rest.add(response)
        assert len(rest.token_ids) == 200

    async def test_a_long_burst_is_cut_into_chunks(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        verifier.welcome.max_context_tokens = 4096
        await verifier.kill()
        await rig.connected(0)
        await verifier.start()
        await rig.connected(1)
        verifier.tokens_per_frame = 1000
        seen = await rig.generate(request(1000))
        assert len(seen.token_ids) == 1000
        assert max(len(chunk.token_ids) for chunk in seen.chunks) < 300  # 256 and what was held back before


class TestQueue:
    async def test_no_verifier_in_time(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        async with running_router(tmp_path, tokenizer, [], verifiers=("unix:nowhere",), verifier_wait_s=0.1) as rig:
            error = await refusal(rig.stub.Generate(request()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            error = await refusal(rig.stub.Generate(request(), timeout=0.05))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            health = health_pb2_grpc.HealthStub(rig.channel)
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await rig.stub.ListModels(pb.ListModelsRequest())).models == []

    async def test_waits_for_the_first_verifier(
        self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
    ) -> None:
        async with running_router(tmp_path, tokenizer, [], verifiers=(verifier.address,)) as rig:
            running = asyncio.create_task(rig.generate(request()))
            await asyncio.sleep(0.05)
            async with fake_verifiers(verifier):
                assert len((await running).token_ids) == 12

    async def test_all_verifiers_lost_while_waiting(
        self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
    ) -> None:
        async with fake_verifiers(verifier):
            async with running_router(tmp_path, tokenizer, [verifier], verifier_wait_s=0.2) as rig:
                verifier.hold_at = 2
                running = asyncio.create_task(rig.generate(request()))
                await until(lambda: verifier.frames == 2)
                await verifier.kill()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await running
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    async def test_a_full_queue_refuses_with_a_delay(
        self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
    ) -> None:
        verifier.hold_at = 1
        verifier.welcome.max_sequences = 5  # one of them is kept for realtime requests
        async with fake_verifiers(verifier):
            async with running_router(tmp_path, tokenizer, [verifier], max_queued_requests=2) as rig:
                running = [asyncio.create_task(rig.generate(request(2))) for _ in range(6)]
                await until(lambda: rig.metric("treeserve_router_queue_depth", service_class="standard") == 2)
                error = await refusal(rig.stub.Generate(request(2)))
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert detail(error, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() >= 1000
                assert detail(error, error_details_pb2.ErrorInfo()).domain == "treeserve"
                assert rig.metric("treeserve_router_rejections_total", reason="Overloaded") == 1
                verifier.hold_at = None
                assert [len(seen.token_ids) for seen in await asyncio.gather(*running)] == [2] * 6

    async def test_urgent_requests_go_first(self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier) -> None:
        verifier.hold_at = 1
        verifier.welcome.max_sequences = 1
        async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
            running = [asyncio.create_task(rig.generate(request(2, request_id="first")))]
            await until(lambda: len(verifier.submits) == 1)
            for name in ("BATCH", "STANDARD", "REALTIME"):
                service_class = common.ServiceClass.Value(f"SERVICE_CLASS_{name}")
                level = common.ServiceLevel(service_class=service_class)
                running.append(asyncio.create_task(rig.generate(request(2, request_id=name, service_level=level))))
                await until(lambda name=name: rig.metric("treeserve_router_queue_depth", service_class=name.lower()))
            verifier.hold_at = None
            await asyncio.gather(*running)
            assert [m.request_id for m in verifier.submits] == ["first", "REALTIME", "STANDARD", "BATCH"]


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


async def test_one_span_per_request_with_the_callers_trace(
    tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
    async with fake_verifiers(verifier):
        async with running_router(tmp_path, tokenizer, [verifier], provider.get_tracer("test")) as rig:
            await rig.generate(request(), metadata=metadata)
    (span,) = exporter.get_finished_spans()
    assert span.name == "treeserve.generate"
    assert format(span.context.trace_id, "032x") == trace_id
    assert [event.name for event in span.events] == ["placed", "first_token"]
    assert verifier.submits[0].traceparent == f"00-{trace_id}-{span.context.span_id:016x}-01"


async def test_draining_lets_streams_end(tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier) -> None:
    verifier.hold_at = 3
    async with fake_verifiers(verifier), open_channel(f"unix:{tmp_path}/router.sock") as channel:
        async with running_router(tmp_path, tokenizer, [verifier], drain_s=10.0):
            call = InferenceServiceStub(channel).Generate(request())
            await until(lambda: verifier.frames == 3)
            asyncio.get_running_loop().call_later(0.1, setattr, verifier, "hold_at", None)
        seen = Collected()
        async for response in call:
            seen.add(response)
        assert len(seen.token_ids) == 12
        error = await refusal(InferenceServiceStub(channel).Generate(request()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
