"""Generate against a scripted verifier: what the router promises about every stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random, recite
from support.router_requests import request
from support.router_rig import RouterRig, running_router

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_text.tokenizer import Tokenizer

UNICODE = "naïve café — 東京 🙂🙂 end"
ANY_TOKEN = pseudo_random(2, 250)


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
