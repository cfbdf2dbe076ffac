"""The service server on loopback: health, reflection, the message limit, binding and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_wire.channel import _OPTIONS, MAX_MESSAGE_BYTES, open_channel
from treeserve_wire.server import LIVENESS, ServiceServer

SERVICE = "treeserve.inference.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Streaming(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started())
        await self.go_on.wait()
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())


@pytest.fixture
def servicer() -> _Streaming:
    return _Streaming()


@pytest.fixture
async def server(servicer: _Streaming) -> AsyncIterator[ServiceServer]:
    server = ServiceServer("127.0.0.1:0", SERVICE)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    yield server
    await server.drain(0)


async def check(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_health_of_the_service_and_of_the_process(server: ServiceServer) -> None:
    address = await server.start(serving=False)
    async with open_channel(address) as channel:
        assert [await check(channel, name) for name in ("", SERVICE)] == [NOT_SERVING, NOT_SERVING]
        assert await check(channel, LIVENESS) == SERVING  # not ready, yet no reason to start it again
        await server.set_serving(True)
        assert [await check(channel, name) for name in ("", SERVICE)] == [SERVING, SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(channel, "unknown.Service")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def list_services(address: str) -> set[str]:
    async with open_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
        return {service.name for service in response.list_services_response.service}


async def test_reflection_lists_the_service(server: ServiceServer) -> None:
    assert {SERVICE, "grpc.health.v1.Health"} <= await list_services(await server.start())


async def test_a_server_of_health_alone_is_reflected_too() -> None:
    server = ServiceServer("127.0.0.1:0", "grpc.health.v1.Health")
    assert "grpc.health.v1.Health" in await list_services(await server.start())
    await server.drain(0)


async def test_reflection_can_be_switched_off() -> None:
    server = ServiceServer("127.0.0.1:0", SERVICE, reflection=False)
    address = await server.start()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await list_services(address)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.drain(0)


async def test_every_call_of_a_burst_is_answered(server: ServiceServer) -> None:
    address = await server.start()
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.ListModels(inference_pb2.ListModelsRequest()) for _ in range(3000)]
        assert {await call.code() for call in calls} == {grpc.StatusCode.UNIMPLEMENTED}


async def test_an_oversize_message_is_refused(server: ServiceServer) -> None:
    address = await server.start()
    request = inference_pb2.GenerateRequest(prompt="x" * (MAX_MESSAGE_BYTES + 1))
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await inference_pb2_grpc.InferenceServiceStub(channel).Generate(request).read()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_drain_flips_health_and_lets_a_running_stream_finish(server: ServiceServer, servicer: _Streaming) -> None:
    address = await server.start()
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        assert (await stream.read()).HasField("started")

        drain = asyncio.create_task(server.drain(grace_s=10))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        assert not drain.done()
        servicer.go_on.set()
        assert (await stream.read()).HasField("finished")
        assert await stream.read() is grpc.aio.EOF
        await asyncio.wait_for(drain, 5)


async def test_drain_cuts_a_stream_that_outlasts_the_grace(server: ServiceServer) -> None:
    address = await server.start()
    async with open_channel(address) as channel:
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await stream.read()
        await asyncio.wait_for(server.drain(grace_s=0.1), 5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
        assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_taken_port_is_an_error(server: ServiceServer) -> None:
    address = await server.start()
    second = ServiceServer(address, SERVICE)
    with pytest.raises(OSError, match=address):
        await second.start()
    await second.drain(0)


async def test_a_unix_socket_is_bound_again_over_the_remains_of_a_dead_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    for _ in range(2):
        server = ServiceServer(address, SERVICE)
        assert await server.start() == address
        async with open_channel(address) as channel:
            assert await check(channel, "") == SERVING
        await server.drain(0)


async def test_a_frozen_peer_is_noticed_when_its_keepalive_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = [(key, value // 20 if "keepalive" in key or "ping_timeout" in key else value) for key, value in _OPTIONS]
    monkeypatch.setattr("treeserve_wire.channel._OPTIONS", faster)

    async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # an HTTP/2 peer that says hello (empty SETTINGS) and no more
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(freeze, tmp_path / "s"), open_channel(f"unix:{tmp_path}/s") as channel:
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(stream.read(), 10)  # due after 1 s of silence and 0.25 s for an answer
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (f"/{SERVICE}/Generate", "unary_stream"),
        ("/grpc.health.v1.Health/Check", "unary_unary"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_what_cannot_be_decoded_is_an_invalid_argument_and_no_error_here(
    server: ServiceServer, method: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    address = await server.start()
    no_text = b"\x0a\x02\xff\xfe"  # a field that holds no text, whatever the message
    async with open_channel(address) as channel:
        call = getattr(channel, kind)(method)(iter([no_text]) if kind.startswith("stream") else no_text)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call if kind == "unary_unary" else [response async for response in call]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in "".join(capfd.readouterr())
