"""Quotas of a router on its own: what each refuses, for how long, and what a share of them is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from support.clock import Clock

from treeserve_core.errors import OverloadedError
from treeserve_router.admission import tenant_label
from treeserve_router.quotas import Quotas
from treeserve_router.shared_quotas import Answer
from treeserve_router.tenants import TenantPolicy, Tenants

ACME, OTHER = tenant_label("acme"), tenant_label("other")


class ScriptedRedis:
    """Stands where Redis does: answers as told, or not at all."""

    def __init__(self) -> None:
        self.answer: Answer | None = Answer(0, 0, 1)
        self.told: list[tuple[int, int]] = []
        self.returned = 0

    async def ask(self, tenant: str, policy: TenantPolicy, in_progress: int, tokens: int) -> Answer | None:
        return self.answer

    def tell(self, tenant: str, policy: TenantPolicy, in_progress: int, tokens: int, requests: int) -> None:
        self.told.append((in_progress, tokens))
        self.returned -= requests


def quotas(policy: TenantPolicy, clock: Clock, redis: ScriptedRedis | None = None) -> Quotas:
    return Quotas(Tenants({"acme": policy}), redis, clock)  # type: ignore[arg-type]


async def admit(quota: Quotas, tokens: int = 1, tenant: str = ACME) -> None:
    async with quota.admitted(tenant, tokens):
        pass


async def admit_in_vain(quota: Quotas, tokens: int = 1, *, is_resumed: bool = False) -> None:
    """A request that its quota lets through, and the queue does not."""
    with pytest.raises(OverloadedError, match="the queue is full"):
        async with quota.admitted(ACME, tokens, is_resumed=is_resumed):
            raise OverloadedError("the queue is full", 1.0, "queue_requests")


async def refusal(quota: Quotas, tokens: int = 1) -> OverloadedError:
    with pytest.raises(OverloadedError) as refused:
        await admit(quota, tokens)
    return refused.value


async def test_requests_a_minute() -> None:
    clock = Clock()
    quota = quotas(TenantPolicy(requests_per_minute=3), clock)
    for _ in range(3):
        await admit(quota)
    error = await refusal(quota)
    assert (error.cause, error.retry_after_s) == ("quota_requests", pytest.approx(20))
    await admit(quota, tenant=OTHER)
    clock.now += 19.9
    assert (await refusal(quota)).retry_after_s == pytest.approx(0.1)
    clock.now += 0.1001
    await admit(quota)
    clock.now += 3600
    for _ in range(3):
        await admit(quota)
    await refusal(quota)


async def test_tokens_a_minute_count_prompts_and_output_as_it_comes() -> None:
    clock = Clock()
    quota = quotas(TenantPolicy(tokens_per_minute=600), clock)
    await admit(quota, 100)
    quota.charge(ACME, 450)
    assert (await refusal(quota, 100)).retry_after_s == pytest.approx(5)
    await admit(quota, 50)
    quota.charge(ACME, 600)  # a running generation goes on; what comes next waits longer
    error = await refusal(quota, 10)
    assert (error.cause, error.retry_after_s) == ("quota_tokens", pytest.approx(61))
    clock.now += 121
    with pytest.raises(OverloadedError):
        quota.charge(ACME, 1)
        await admit(quota, 5000)  # more than a minute gives: only from a full bucket
    clock.now += 1
    await admit(quota, 5000)


async def test_requests_in_progress() -> None:
    quota = quotas(TenantPolicy(max_in_progress=2), Clock())
    async with quota.admitted(ACME, 1):
        async with quota.admitted(ACME, 1):
            error = await refusal(quota)
            assert (error.cause, error.retry_after_s) == ("quota_in_progress", 1)
        await admit(quota)


async def test_one_that_fails_is_in_progress_no_more() -> None:
    quota = quotas(TenantPolicy(max_in_progress=1), Clock())
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            async with quota.admitted(ACME, 1):
                raise ZeroDivisionError
    await admit(quota)


async def test_what_another_router_admitted_is_neither_charged_nor_refused() -> None:
    quota = quotas(TenantPolicy(requests_per_minute=1, max_in_progress=1), Clock())
    async with quota.admitted(ACME, 1):
        async with quota.admitted(ACME, 1, is_resumed=True):
            pass
    assert (await refusal(quota)).cause == "quota_requests"


async def test_what_the_queue_refuses_is_given_back() -> None:
    clock = Clock()
    quota = quotas(TenantPolicy(requests_per_minute=2, tokens_per_minute=600), clock)
    await admit(quota, 100)
    for _ in range(5):
        await admit_in_vain(quota, 500)
    await admit_in_vain(quota, 1, is_resumed=True)  # it was charged elsewhere
    assert (await refusal(quota, 501)).cause == "quota_tokens"
    await admit(quota, 500)
    assert (await refusal(quota)).cause == "quota_requests"


async def test_what_fails_otherwise_stays_charged() -> None:
    quota = quotas(TenantPolicy(requests_per_minute=1), Clock())
    with pytest.raises(ZeroDivisionError):
        async with quota.admitted(ACME, 1):
            raise ZeroDivisionError
    assert (await refusal(quota)).cause == "quota_requests"


async def test_redis_is_given_back_what_it_granted_and_no_more() -> None:
    redis = ScriptedRedis()
    quota = quotas(TenantPolicy(requests_per_minute=4, tokens_per_minute=600), Clock(), redis)
    await admit_in_vain(quota, 30)
    redis.answer = None
    await admit_in_vain(quota, 50)
    quota.settle()
    assert (redis.told, redis.returned) == ([(0, -30)], 1)
    quota.settle()
    assert len(redis.told) == 1


async def test_what_is_given_back_adds_nothing_to_a_routers_share() -> None:
    redis = ScriptedRedis()
    quota = quotas(TenantPolicy(requests_per_minute=8), Clock(), redis)
    redis.answer = Answer(0, 0, 4)
    for _ in range(5):
        await admit(quota)  # this router's share is two
    for _ in range(5):
        await admit_in_vain(quota)
    redis.answer = None
    assert (await refusal(quota)).cause == "quota_requests"


async def test_a_debt_is_not_forgotten() -> None:
    clock = Clock()
    quota = quotas(TenantPolicy(tokens_per_minute=600), clock)
    await admit(quota, 1)
    quota.charge(ACME, 2399)
    for _ in range(3):
        clock.now += 60
        quota.settle()
    assert (await refusal(quota, 100)).retry_after_s == pytest.approx(10)
    clock.now += 60.001
    quota.settle()
    quota.settle()
    assert quota._accounts == {}


async def test_a_tenant_that_comes_back_gets_the_share_that_it_had() -> None:
    clock, redis = Clock(), ScriptedRedis()
    quota = quotas(TenantPolicy(requests_per_minute=30), clock, redis)
    redis.answer = Answer(0, 0, 3)
    await admit(quota)
    clock.now += 3600
    quota.settle()
    assert quota._accounts == {}
    redis.answer = None
    for _ in range(10):
        await admit(quota)
    assert (await refusal(quota)).cause == "quota_requests"


async def test_a_short_pause_changes_no_share() -> None:
    clock, redis = Clock(), ScriptedRedis()
    quota = Quotas(Tenants({"*": TenantPolicy(requests_per_minute=30)}), redis, clock)  # type: ignore[arg-type]
    for tenant, routers in ((ACME, 3), (OTHER, 1)):
        redis.answer = Answer(0, 0, routers)
        await admit(quota, tenant=tenant)
    clock.now += 59
    quota.settle()
    redis.answer = None
    for _ in range(10):
        await admit(quota)
    assert (await refusal(quota)).cause == "quota_requests"


@contextlib.asynccontextmanager
async def in_progress(quota: Quotas, count: int) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(quota.admitted(ACME, 1))
        yield


async def test_without_redis_each_router_grants_its_share() -> None:
    clock, redis = Clock(), ScriptedRedis()
    quota = quotas(TenantPolicy(requests_per_minute=30, max_in_progress=9), clock, redis)
    redis.answer = Answer(0, 0, 3)  # three routers serve it
    await admit(quota)
    redis.answer = None
    async with in_progress(quota, 3):
        assert (await refusal(quota)).cause == "quota_in_progress"
    for _ in range(6):
        await admit(quota)
    assert (await refusal(quota)).cause == "quota_requests", "10 of 30, one of them while Redis answered"
    clock.now += 6.001
    await admit(quota)
    await refusal(quota)
    redis.answer = Answer(0, 0, 3)
    for _ in range(15):
        await admit(quota)
    redis.answer = None
    assert (await refusal(quota)).cause == "quota_requests", "losing Redis again opens no new quota"
    clock.now += 6.001
    await admit(quota)


async def test_a_share_below_one_request_is_still_a_rate() -> None:
    clock, redis = Clock(), ScriptedRedis()
    quota = quotas(TenantPolicy(requests_per_minute=1), clock, redis)
    redis.answer = Answer(0, 0, 4)
    await admit(quota)
    redis.answer = None
    admitted = 0
    for _ in range(60 * 16):
        clock.now += 1
        with contextlib.suppress(OverloadedError):
            await admit(quota)
            admitted += 1
    assert 3 <= admitted <= 5  # 16 minutes, a quarter each


async def test_redis_refuses_with_its_own_delay() -> None:
    redis = ScriptedRedis()
    quota = quotas(TenantPolicy(tokens_per_minute=600), Clock(), redis)
    redis.answer = Answer(2, 2500, 1)
    error = await refusal(quota)
    assert (error.cause, error.retry_after_s) == ("quota_tokens", 2.5)
    assert "tokens a minute" in str(error)


async def test_output_is_told_together_and_leases_are_renewed() -> None:
    clock, redis = Clock(), ScriptedRedis()
    quota = quotas(TenantPolicy(tokens_per_minute=600), clock, redis)
    async with quota.admitted(ACME, 10):
        for _ in range(5):
            quota.charge(ACME, 3)
        quota.charge(OTHER, 100)  # it has no quota
        quota.settle()
        quota.settle()
        assert redis.told == [(1, 15)]
        clock.now += 10
        quota.settle()
        assert redis.told == [(1, 15), (1, 0)]
    clock.now += 100
    quota.settle()
    assert quota._accounts == {}


async def test_a_tenant_without_a_quota_is_not_asked_about() -> None:
    redis = ScriptedRedis()
    redis.answer = Answer(1, 1, 1)
    quota = quotas(TenantPolicy(weight=2), Clock(), redis)
    await admit(quota, 10**9)
    await admit(quota, 10**9, OTHER)
    quota.settle()
    assert redis.told == []
