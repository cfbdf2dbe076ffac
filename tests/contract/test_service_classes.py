"""Service classes, quotas and the full queue as clients meet them, over gRPC and HTTP, against a scripted verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from support.fake_verifier import FakeVerifier, fake_verifiers
from support.router_requests import detail
from support.router_rig import RouterRig, running_router
from support.valkey import running_valkey
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import ServiceClass
from treeserve_router.tenants import TenantPolicy

TENANT, CLASS = "x-tenant", "x-class"
REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass
Metadata = Sequence[tuple[str, str]]
Serving = tuple[RouterRig, httpx.AsyncClient]


def request(service_class: int = 0, max_tokens: int = 2, **level: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt="one",
        stopping=common.StoppingCriteria(max_tokens=max_tokens),
        service_level=common.ServiceLevel(service_class=common.ServiceClass.ValueType(service_class), **level),
    )


@asynccontextmanager
async def serving(
    verifier: FakeVerifier, folder: Path, **config: Any
) -> AsyncIterator[tuple[RouterRig, httpx.AsyncClient]]:
    async with (
        fake_verifiers(verifier),
        running_router(folder, verifier.tokenizer, [verifier], **config) as rig,
        httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as http,
    ):
        yield rig, http


async def over_http(http: httpx.AsyncClient, headers: Metadata = (), **fields: Any) -> httpx.Response:
    body = {"prompt": "one", "max_tokens": 2, **fields}
    return await http.post("/v1/completions", json=body, headers=list(headers))


async def refusal(rig: RouterRig, message: pb.GenerateRequest, metadata: Metadata = ()) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generate(message, metadata=tuple(metadata))
    return caught.value


def sent(message: verifier_pb2.SubmitSequence) -> tuple[int, float, float]:
    level = message.service_level
    return level.service_class, level.ttft_ms, level.tpot_ms


def promised(service_class: ServiceClass) -> tuple[int, float, float]:
    policy = DEFAULT_POLICIES[service_class]
    return int(service_class), policy.ttft_ms or 0, policy.tpot_ms or 0


# --- Classes


async def test_the_classes_targets_reach_the_verifier(verifier: FakeVerifier, tmp_path: Path) -> None:
    async with serving(verifier, tmp_path) as (rig, http):
        for service_class in (0, *ServiceClass):
            await rig.generate(request(service_class))
            assert sent(verifier.submits[-1]) == promised(ServiceClass(service_class or STANDARD))
            assert verifier.submits[-1].preemptible is (service_class == BATCH)
        for fields, service_class in [
            ({}, STANDARD),
            ({"service_class": "realtime"}, REALTIME),
            ({"service_tier": "auto"}, STANDARD),
            ({"service_tier": "default"}, STANDARD),
            ({"service_tier": "flex"}, BATCH),
            ({"service_tier": "priority"}, INTERACTIVE),
            ({"service_tier": "priority", "service_class": "interactive"}, INTERACTIVE),
        ]:
            assert (await over_http(http, **fields)).status_code == 200
            assert sent(verifier.submits[-1]) == promised(service_class)
        for fields in ({"service_tier": "scale"}, {"service_tier": "flex", "service_class": "realtime"}):
            answer = await over_http(http, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")


async def test_configured_policies_hold(verifier: FakeVerifier, tmp_path: Path) -> None:
    policies = DEFAULT_POLICIES | {STANDARD: DEFAULT_POLICIES[BATCH], BATCH: DEFAULT_POLICIES[STANDARD]}
    async with serving(verifier, tmp_path, qos=policies, default_service_class="batch") as (rig, http):
        await rig.generate(request())
        assert sent(verifier.submits[-1])[:2] == (BATCH, 5000)
        await over_http(http, service_class="standard")
        assert verifier.submits[-1].preemptible


async def test_a_gateway_grants_and_clients_may_only_ask_for_less(verifier: FakeVerifier, tmp_path: Path) -> None:
    async with serving(verifier, tmp_path, service_class_header=CLASS) as (rig, http):
        granted = ((CLASS, "interactive"),)
        await rig.generate(request(), metadata=granted)
        assert sent(verifier.submits[-1]) == promised(INTERACTIVE)
        assert (await over_http(http, granted)).status_code == 200
        assert sent(verifier.submits[-1]) == promised(INTERACTIVE)
        assert (await over_http(http, granted, service_class="batch", ttft_ms=None)).status_code == 200
        assert sent(verifier.submits[-1]) == promised(BATCH)

        for message, metadata in [
            (request(REALTIME), granted),
            (request(INTERACTIVE), ()),
            (request(ttft_ms=10), ()),
            (request(INTERACTIVE), (*granted, (CLASS, "realtime"))),
        ]:
            error = await refusal(rig, message, metadata)
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "service_level" in (error.details() or "")
        for fields in ({"service_class": "realtime"}, {"service_tier": "priority"}, {"tpot_ms": 1}):
            answer = await over_http(http, **fields)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        error = await refusal(rig, request(), ((CLASS, "gold"),))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await over_http(http, ((CLASS, "gold"),))).json()["error"]["param"] == CLASS


async def test_clients_behind_a_gateway_can_be_trusted(verifier: FakeVerifier, tmp_path: Path) -> None:
    async with serving(verifier, tmp_path, tenant_header=TENANT, trust_clients=True) as (rig, _):
        await rig.generate(request(REALTIME, ttft_ms=10))
        assert sent(verifier.submits[-1])[:2] == (REALTIME, 10)


# --- Quotas


async def test_a_used_up_quota_is_refused_with_a_delay(verifier: FakeVerifier, tmp_path: Path) -> None:
    quotas = {"acme": TenantPolicy(requests_per_minute=2), "*": TenantPolicy(max_in_progress=1)}
    async with serving(verifier, tmp_path, tenant_header=TENANT, tenants=quotas) as (rig, http):
        acme, other = ((TENANT, "acme"),), ((TENANT, "other"),)
        await rig.generate(request(), metadata=acme)
        assert (await over_http(http, acme)).status_code == 200
        error = await refusal(rig, request(), acme)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 25 <= detail(error, error_details_pb2.RetryInfo()).retry_delay.seconds <= 30
        assert detail(error, error_details_pb2.ErrorInfo()).metadata["cause"] == "quota_requests"
        answer = await over_http(http, acme)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 25 <= int(answer.headers["retry-after"]) <= 30
        assert rig.metric("treeserve_router_refusals_total", cause="quota_requests") == 2

        verifier.hold_at = 1
        running = asyncio.create_task(rig.generate(request(), metadata=other))
        await until(lambda: len(verifier.submits) == 3)
        error = await refusal(rig, request(), other)
        assert detail(error, error_details_pb2.ErrorInfo()).metadata["cause"] == "quota_in_progress"
        verifier.hold_at = None
        await running
        await rig.generate(request(), metadata=other)


async def test_output_is_charged_to_the_quota(verifier: FakeVerifier, tmp_path: Path) -> None:
    quotas = {"*": TenantPolicy(tokens_per_minute=60)}
    async with serving(verifier, tmp_path, tenants=quotas) as (rig, http):
        await rig.generate(request(max_tokens=100))
        answer = await over_http(http)
        assert answer.status_code == 429
        assert 40 <= int(answer.headers["retry-after"]) <= 60


async def test_two_routers_grant_one_quota(verifier: FakeVerifier, tmp_path: Path) -> None:
    quotas = {"*": TenantPolicy(requests_per_minute=2)}
    (tmp_path / "two").mkdir()
    with running_valkey() as valkey:
        config = {"tenants": quotas, "redis_url": valkey.connection_url}
        async with (
            serving(verifier, tmp_path, router_id="one", **config) as (one, _),
            running_router(tmp_path / "two", verifier.tokenizer, [verifier], router_id="two", **config) as two,
        ):
            for rig in (one, two):
                await until(lambda rig=rig: rig.metric("treeserve_router_redis_seconds_count") >= 1)
                await rig.generate(request())
            for rig in (one, two):
                error = await refusal(rig, request())
                assert detail(error, error_details_pb2.ErrorInfo()).metadata["cause"] == "quota_requests"


# --- The queue


@asynccontextmanager
async def full_verifier(verifier: FakeVerifier, rig: RouterRig) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """One sequence runs, held; what is appended is awaited in the end, when all may go on."""
    verifier.hold_at = 1
    tasks = [asyncio.create_task(rig.generate(request(REALTIME)))]
    await until(lambda: len(verifier.submits) == 1)
    yield tasks
    verifier.hold_at = None
    await asyncio.gather(*tasks, return_exceptions=True)


async def _waiting(rig: RouterRig, num: int) -> None:
    def depth() -> float:
        names = [c.name.lower() for c in ServiceClass]
        return sum(rig.metric("treeserve_router_queue_depth", service_class=name) for name in names)

    await until(lambda: depth() == num)


async def test_urgent_work_gets_into_a_full_queue(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.welcome.max_sequences = 1
    async with serving(verifier, tmp_path, max_queued_requests=2) as (rig, http):
        async with full_verifier(verifier, rig) as tasks:
            batches = [asyncio.create_task(over_http(http, service_class="batch")) for _ in range(2)]
            await _waiting(rig, 2)
            urgent = asyncio.create_task(rig.generate(request(INTERACTIVE)))
            tasks += [*batches, urgent]
            await asyncio.wait(batches, return_when=asyncio.FIRST_COMPLETED)
            (displaced,) = [batch.result() for batch in batches if batch.done()]
            assert displaced.status_code == 429
            assert int(displaced.headers["retry-after"]) >= 1
            assert (await over_http(http, service_class="batch")).status_code == 429
            assert rig.metric("treeserve_router_refusals_total", cause="displaced") == 1
            assert rig.metric("treeserve_router_refusals_total", cause="queue_requests") == 1
        assert len(urgent.result().token_ids) == 2
        assert sorted(batch.result().status_code for batch in batches) == [200, 429]


async def test_what_the_queue_refuses_costs_no_quota(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.welcome.max_sequences = 1
    quotas = {"*": TenantPolicy(requests_per_minute=4, tokens_per_minute=10_000)}
    async with serving(verifier, tmp_path, max_queued_requests=1, tenants=quotas) as (rig, http):
        async with full_verifier(verifier, rig) as tasks:
            displaced = asyncio.create_task(over_http(http, service_class="batch"))
            await _waiting(rig, 1)
            tasks.append(asyncio.create_task(rig.generate(request(INTERACTIVE))))
            assert (await displaced).status_code == 429
            for _ in range(3):
                error = await refusal(rig, request(BATCH))
                assert detail(error, error_details_pb2.ErrorInfo()).metadata["cause"] == "queue_requests"
        for _ in range(2):
            await rig.generate(request())
        error = await refusal(rig, request())
        assert detail(error, error_details_pb2.ErrorInfo()).metadata["cause"] == "quota_requests"


async def _order(verifier: FakeVerifier, rig: RouterRig, asks: Sequence[tuple[str, ServiceClass]]) -> list[str]:
    """The order in which waiting requests (tenant, class) are dispatched."""
    async with full_verifier(verifier, rig) as tasks:
        for n, (tenant, service_class) in enumerate(asks, 1):
            message = request(service_class)
            message.request_id = f"{tenant}-{service_class.name.lower()}"
            tasks.append(asyncio.create_task(rig.generate(message, metadata=((TENANT, tenant),))))
            await _waiting(rig, n)
    return [message.request_id for message in verifier.submits[1:]]


async def test_in_order_of_arrival_if_so_configured(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.welcome.max_sequences = 1
    async with serving(verifier, tmp_path, queue_policy="fifo") as (rig, _):
        order = await _order(verifier, rig, [("a", BATCH), ("a", STANDARD), ("a", INTERACTIVE)])
    assert order == ["a-batch", "a-standard", "a-interactive"]


async def test_output_counts_in_fair_shares(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.welcome.max_sequences = 1
    async with serving(verifier, tmp_path, tenant_header=TENANT, trust_clients=True) as (rig, _):
        await rig.generate(request(max_tokens=2), metadata=((TENANT, "b"),))
        await rig.generate(request(max_tokens=200), metadata=((TENANT, "a"),))
        verifier.submits.clear()
        order = await _order(verifier, rig, [("a", STANDARD), ("b", STANDARD)])
    assert order == ["b-standard", "a-standard"]


async def test_what_expires_leaves_the_queue_at_once(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.welcome.max_sequences = 1
    async with serving(verifier, tmp_path) as (rig, _):
        async with full_verifier(verifier, rig):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.generate(request(), timeout=0.2)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await _waiting(rig, 0)
        assert len(verifier.submits) == 1
