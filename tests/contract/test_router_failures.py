"""Generate when something ends early or goes wrong: clients that leave, verifiers that die, refuse or misbehave."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_requests import refusal, request
from support.router_rig import Collected, RouterRig, running_router
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_core.errors import InvalidArgumentError, OverloadedError, UnavailableError
from treeserve_text.tokenizer import Tokenizer

ANY_TOKEN = pseudo_random(2, 250)


@pytest.fixture
def other_verifier(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/b.sock", ANY_TOKEN)


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
