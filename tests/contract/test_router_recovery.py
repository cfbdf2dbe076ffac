"""Verifiers that fall silent, wake up, drain or give work back, and a router that ends: what a stream shows of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.fake_verifier import FakeVerifier, Script, fake_verifiers, pseudo_random
from support.router_rig import Collected, RouterRig, load_tokenizer, running_router
from support.valkey import running_valkey
from support.waiting import until

import treeserve_client as sdk
import treeserve_client.client as sdk_client
from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceStub
from treeserve_core.errors import HandedBackError
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.channel import open_channel

ANY_TOKEN = pseudo_random(2, 250)
STALL_S = 0.1


@pytest.fixture
def first(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    """Where a request goes while both are idle."""
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", ANY_TOKEN, max_sequences=16)


@pytest.fixture
def second(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/b.sock", ANY_TOKEN, max_sequences=16)


@pytest.fixture
async def rig(
    tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier, second: FakeVerifier
) -> AsyncIterator[RouterRig]:
    both = [first, second]
    async with fake_verifiers(*both), running_router(tmp_path, tokenizer, both, stall_timeout_s=STALL_S) as rig:
        yield rig


def request(max_tokens: int = 30, **fields: Any) -> pb.GenerateRequest:
    sampling = common.SamplingParameters(seed=7, temperature=1.0)
    stopping = common.StoppingCriteria(max_tokens=max_tokens)
    return pb.GenerateRequest(prompt="one two", sampling=sampling, stopping=stopping, **fields)


def hedges(rig: RouterRig, outcome: str) -> float:
    return rig.metric("treeserve_router_hedges_total", outcome=outcome)


class TestSilence:
    async def test_a_silent_verifiers_sequence_goes_on_elsewhere(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        undisturbed = await rig.generate(request())
        first.hold_at = 5
        seen = await rig.generate(request())
        assert seen.token_ids == undisturbed.token_ids
        assert seen.text == undisturbed.text
        assert seen.finished.usage == undisturbed.finished.usage
        assert list(second.submits[0].generated_token_ids) == undisturbed.token_ids[:5]
        assert second.submits[0].sampling == first.submits[1].sampling
        await until(lambda: first.cancelled == [first.submits[1].handle])
        assert (hedges(rig, "started"), hedges(rig, "won"), hedges(rig, "lost")) == (1, 1, 0)
        assert rig.metric("treeserve_router_replays_total") == 0

    async def test_what_it_says_when_it_wakes_up_is_not_shown(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        undisturbed = await rig.generate(request())
        first.hold_at, second.hold_at, first.deaf = 5, 20, True
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: first.cancelled)
        frames = first.frames
        first.hold_at = None
        await until(lambda: first.frames == frames + 25)
        second.hold_at = None
        assert (await running).token_ids == undisturbed.token_ids

    async def test_one_that_wakes_up_first_keeps_its_sequence(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        undisturbed = await rig.generate(request())
        first.hold_at = second.hold_at = 5
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: second.submits)
        first.hold_at = None
        assert (await running).token_ids == undisturbed.token_ids
        await until(lambda: second.cancelled == [second.submits[0].handle])
        assert (hedges(rig, "started"), hedges(rig, "won"), hedges(rig, "lost")) == (1, 0, 1)

    @pytest.mark.parametrize("deaf", [False, True])
    async def test_one_of_two_different_continuations_is_shown(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier, second: FakeVerifier, deaf: bool
    ) -> None:
        """Under a rule that is not replay verifiers need not agree; an output is still one continued by another."""

        def only(token_id: int) -> Script:
            return lambda message, output: token_id

        rules = [common.ACCEPTANCE_RULE_REPLAY, common.ACCEPTANCE_RULE_MULTI_STEP]
        for each, token_id in ((first, 10), (second, 20)):
            each.welcome.acceptance_rules.extend(rules)
            each.script = only(token_id)
        first.hold_at, first.deaf = 5, deaf
        both = [first, second]
        async with fake_verifiers(*both), running_router(tmp_path, tokenizer, both, stall_timeout_s=STALL_S) as rig:
            asked = request(speculation=common.SpeculationOptions(acceptance=common.ACCEPTANCE_RULE_MULTI_STEP))
            running = asyncio.create_task(rig.generate(asked))
            await until(lambda: second.submits)
            first.hold_at = None
            seen = await running
        switched = seen.token_ids.index(20) if 20 in seen.token_ids else 30
        assert seen.token_ids == [10] * switched + [20] * (30 - switched)

    async def test_one_that_answers_lives_and_keeps_its_sequence(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        first.hold_at, first.answers = 5, True
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: first.frames == 5)
        await asyncio.sleep(3 * STALL_S)
        first.hold_at = None
        assert len((await running).token_ids) == 30
        assert not second.submits

    async def test_one_that_answers_but_never_goes_on(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        first.hold_at, first.answers = 5, True
        assert len((await rig.generate(request())).token_ids) == 30
        assert len(second.submits) == 1

    async def test_nothing_more_goes_to_it_until_it_is_heard_again(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        first.hold_at, second.hold_at = 5, 6
        running = [asyncio.create_task(rig.generate(request()))]
        await until(lambda: second.submits)
        running += [asyncio.create_task(rig.generate(request())) for _ in range(3)]
        await until(lambda: len(second.submits) == 4)
        assert len(first.submits) == 1
        await first.report(total_blocks=100, free_blocks=100)
        running.append(asyncio.create_task(rig.generate(request())))
        await until(lambda: len(first.submits) == 2)
        first.hold_at = second.hold_at = None
        assert len({tuple((await each).token_ids) for each in running}) == 1

    async def test_a_verifier_that_stays_silent_from_the_start(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        first.hold_at = 0
        assert len((await rig.generate(request())).token_ids) == 30
        assert not second.submits[0].generated_token_ids

    async def test_a_newer_turn_of_its_session_does_not_end_it(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        """Turns that begin are fenced by their epoch; what goes on elsewhere has none."""
        first.hold_at = 5
        both = [first, second]
        with running_valkey() as valkey:
            options = {"stall_timeout_s": STALL_S, "redis_url": valkey.connection_url}
            async with fake_verifiers(*both), running_router(tmp_path, tokenizer, both, **options) as rig:
                await until(lambda: rig.metric("treeserve_router_redis_seconds_count") >= 1)
                assert len((await rig.generate(request(session_id="s"))).token_ids) == 30
        assert first.submits[0].session_epoch > 0
        assert (second.submits[0].session_id, second.submits[0].session_epoch) == ("s", 0)

    async def test_so_many_run_twice_at_once_and_no_more(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        both = [first, second]
        first.hold_at = second.hold_at = 5
        options = {"stall_timeout_s": STALL_S, "max_hedges": 2}
        async with fake_verifiers(*both), running_router(tmp_path, tokenizer, both, **options) as rig:
            await second.report(draining=True)
            running = [asyncio.create_task(rig.generate(request())) for _ in range(4)]
            await until(lambda: first.frames == 20)
            await second.report(draining=False)
            await until(lambda: len(second.submits) == 2)
            await asyncio.sleep(5 * STALL_S)
            assert len(second.submits) == 2
            second.hold_at = None
            assert len({tuple((await each).token_ids) for each in running}) == 1
            assert len(second.submits) == 4

    async def test_the_only_verifier_may_be_silent(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier
    ) -> None:
        first.hold_at = 5
        async with fake_verifiers(first), running_router(tmp_path, tokenizer, [first], stall_timeout_s=0.05) as rig:
            running = asyncio.create_task(rig.generate(request()))
            await until(lambda: first.frames == 5)
            await asyncio.sleep(0.4)
            first.hold_at = None
            assert len((await running).token_ids) == 30
            assert len(first.submits) == 1

    async def test_a_verifier_that_dies_while_its_sequence_runs_twice(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        undisturbed = await rig.generate(request())
        first.hold_at = second.hold_at = 5
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: second.submits)
        await first.kill()
        await rig.connected(1)
        second.hold_at = None
        assert (await running).token_ids == undisturbed.token_ids
        assert rig.metric("treeserve_router_replays_total") == 0


class TestDrainingVerifier:
    async def test_sequences_move_on(self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier) -> None:
        undisturbed = await rig.generate(request())
        first.hold_at = 5
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: first.frames >= 5 + 30)
        await first.report(draining=True)
        assert (await running).token_ids == undisturbed.token_ids
        assert list(second.submits[0].generated_token_ids) == undisturbed.token_ids[:5]
        assert rig.metric("treeserve_router_moves_total") == 1
        assert rig.metric("treeserve_router_replays_total") == 0

    async def test_they_stay_while_nobody_has_room(
        self, rig: RouterRig, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        undisturbed = await rig.generate(request())
        await second.report(sequences=1, total_blocks=100, free_blocks=0)
        first.hold_at = 5
        running = asyncio.create_task(rig.generate(request()))
        await until(lambda: first.frames >= 5 + 30)
        await first.report(draining=True)
        first.hold_at = 12
        await until(lambda: first.frames >= 12 + 30)
        assert not second.submits
        await second.report(total_blocks=100, free_blocks=100)
        assert (await running).token_ids == undisturbed.token_ids
        assert list(second.submits[0].generated_token_ids) == undisturbed.token_ids[:12]

    async def test_handing_back_is_no_failure(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier, second: FakeVerifier
    ) -> None:
        first.refuse = HandedBackError("draining")
        both = [first, second]
        async with fake_verifiers(*both), running_router(tmp_path, tokenizer, both, max_replays=1) as rig:
            second.hold_at = 0
            running = asyncio.create_task(rig.generate(request()))
            await until(lambda: second.submits)
            first.refuse = None
            await second.kill()  # the one failure that is allowed
            assert len((await running).token_ids) == 30

    async def test_a_verifier_that_only_hands_back_fails_in_the_end(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier
    ) -> None:
        first.refuse = HandedBackError("draining")
        async with fake_verifiers(first), running_router(tmp_path, tokenizer, [first], max_replays=2) as rig:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.generate(request())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert len(first.submits) == 4


class TestEndOfARouter:
    async def test_what_runs_on_is_ended_and_says_so(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier
    ) -> None:
        first.hold_at = 5
        seen = Collected()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fake_verifiers(first))
            router = AsyncExitStack()
            rig = await router.enter_async_context(running_router(tmp_path, tokenizer, [first], drain_s=0.2))
            channel = await stack.enter_async_context(open_channel(rig.grpc))
            call = InferenceServiceStub(channel).Generate(request())
            await until(lambda: first.frames == 5)
            ending = asyncio.create_task(router.aclose())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for response in call:
                    seen.add(response)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert len(seen.token_ids) == 5
            async with asyncio.timeout(5):
                await ending
            await until(lambda: not first.streams or first.cancelled)

    async def test_an_http_stream_is_told_too(self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier) -> None:
        first.hold_at = 5
        body = {"prompt": "one two", "max_tokens": 30, "stream": True}
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fake_verifiers(first))
            router = AsyncExitStack()
            rig = await router.enter_async_context(running_router(tmp_path, tokenizer, [first], drain_s=0.2))
            client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
            async with client.stream("POST", f"http://{rig.http}/v1/completions", json=body) as response:
                await until(lambda: first.frames == 5)
                ending = asyncio.create_task(router.aclose())
                lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
            async with asyncio.timeout(5):
                await ending
        assert "the router shuts down" in json.loads(lines[-2])["error"]["message"]
        assert lines[-1] == "[DONE]"

    @pytest.mark.parametrize("slow", [False, True])
    async def test_the_client_goes_on_at_another_router(
        self, tokenizer: Tokenizer, tmp_path: Path, first: FakeVerifier, slow: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one that reads so slowly that the router cannot tell it why it ends."""
        monkeypatch.setattr(sdk_client, "_OPTIONS", (("grpc.http2.bdp_probe", 0),))  # small buffers on its way
        for name in "xy":
            (tmp_path / name).mkdir()
            load_tokenizer(tmp_path / name)
        first.welcome.max_context_tokens = 8192
        first.tokens_per_frame = 50
        first.script = lambda message, output: 2 + len(output) * 7 % 248
        params: dict[str, Any] = {"prompt": "one two", "max_tokens": 8000, "seed": 7, "temperature": 1.0}
        params["top_log_probs"] = 0  # so that it does not fit those buffers
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fake_verifiers(first))
            dying = AsyncExitStack()
            one = await dying.enter_async_context(running_router(tmp_path / "x", tokenizer, [first], drain_s=0.1))
            two = await stack.enter_async_context(running_router(tmp_path / "y", tokenizer, [first]))
            async with sdk.AsyncClient(f"{one.grpc},{two.grpc}") as client:
                undisturbed = await client.complete(**params)
                first.hold_at = None if slow else 4000
                async with client.generate(**params) as stream:
                    received = 0
                    async for chunk in stream:
                        assert chunk.offset == received
                        received += len(chunk.token_ids)
                        if received >= 1000:
                            break
                    if slow:
                        await until(lambda: first.frames >= 2 * 8000 // 50)  # the verifier is done
                        assert one.metric("treeserve_router_output_tokens_total") < 8000 + 7000
                    await dying.aclose()
                    first.hold_at = None
                    async for chunk in stream:
                        assert chunk.offset == received
                        received += len(chunk.token_ids)
                assert stream.result.token_ids == undisturbed.token_ids
                assert stream.result.text == undisturbed.text
                assert stream.result.usage == undisturbed.usage
                assert len(first.submits) == 3
                assert (await client.list_models())[0].verifiers == 1
