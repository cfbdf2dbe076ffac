"""Requests that wait for a verifier or a place, and what a draining router does with those that run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_verifier import FakeVerifier, fake_verifiers
from support.router_requests import detail, refusal, request
from support.router_rig import Collected, running_router
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceStub
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.channel import open_channel


class TestQueue:
    async def test_no_verifier_in_time(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        async with running_router(tmp_path, tokenizer, [], verifiers=("unix:nowhere",), verifier_wait_s=0.1) as rig:
            error = await refusal(rig.stub.Generate(request()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            error = await refusal(rig.stub.Generate(request(), timeout=0.05))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            health = health_pb2_grpc.HealthStub(rig.channel)
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await rig.stub.ListModels(pb.ListModelsRequest())).models == []

    async def test_waits_for_the_first_verifier(
        self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
    ) -> None:
        async with running_router(tmp_path, tokenizer, [], verifiers=(verifier.address,)) as rig:
            running = asyncio.create_task(rig.generate(request()))
            await asyncio.sleep(0.05)
            async with fake_verifiers(verifier):
                assert len((await running).token_ids) == 12

    async def test_all_verifiers_lost_while_waiting(
        self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
    ) -> None:
        async with fake_verifiers(verifier):
            async with running_router(tmp_path, tokenizer, [verifier], verifier_wait_s=0.2) as rig:
                verifier.hold_at = 2
                running = asyncio.create_task(rig.generate(request()))
                await until(lambda: verifier.frames == 2)
                await verifier.kill()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await running
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    async def test_a_full_queue_refuses_with_a_delay(
        self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
    ) -> None:
        verifier.hold_at = 1
        verifier.welcome.max_sequences = 5  # one of them is kept for realtime requests
        async with fake_verifiers(verifier):
            async with running_router(tmp_path, tokenizer, [verifier], max_queued_requests=2) as rig:
                running = [asyncio.create_task(rig.generate(request(2))) for _ in range(6)]
                await until(lambda: rig.metric("treeserve_router_queue_depth", service_class="standard") == 2)
                error = await refusal(rig.stub.Generate(request(2)))
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert detail(error, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() >= 1000
                assert detail(error, error_details_pb2.ErrorInfo()).domain == "treeserve"
                assert rig.metric("treeserve_router_rejections_total", reason="Overloaded") == 1
                verifier.hold_at = None
                assert [len(seen.token_ids) for seen in await asyncio.gather(*running)] == [2] * 6

    async def test_urgent_requests_go_first(self, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier) -> None:
        verifier.hold_at = 1
        verifier.welcome.max_sequences = 1
        async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
            running = [asyncio.create_task(rig.generate(request(2, request_id="first")))]
            await until(lambda: len(verifier.submits) == 1)
            for name in ("BATCH", "STANDARD", "REALTIME"):
                service_class = common.ServiceClass.Value(f"SERVICE_CLASS_{name}")
                level = common.ServiceLevel(service_class=service_class)
                running.append(asyncio.create_task(rig.generate(request(2, request_id=name, service_level=level))))
                await until(lambda name=name: rig.metric("treeserve_router_queue_depth", service_class=name.lower()))
            verifier.hold_at = None
            await asyncio.gather(*running)
            assert [m.request_id for m in verifier.submits] == ["first", "REALTIME", "STANDARD", "BATCH"]


async def test_draining_lets_streams_end(tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier) -> None:
    verifier.hold_at = 3
    async with fake_verifiers(verifier), open_channel(f"unix:{tmp_path}/router.sock") as channel:
        async with running_router(tmp_path, tokenizer, [verifier], drain_s=10.0):
            call = InferenceServiceStub(channel).Generate(request())
            await until(lambda: verifier.frames == 3)
            asyncio.get_running_loop().call_later(0.1, setattr, verifier, "hold_at", None)
        seen = Collected()
        async for response in call:
            seen.add(response)
        assert len(seen.token_ids) == 12
        error = await refusal(InferenceServiceStub(channel).Generate(request()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
