"""API keys at the router: every call but health needs one, and it says whose the call is and what it may ask for."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import Route
from structlog.testing import capture_logs
from support.fake_verifier import FakeVerifier, fake_verifiers
from support.router_requests import detail
from support.router_rig import RouterRig, running_router

import treeserve_client as sdk
import treeserve_router.main as router_main
from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_router import auth
from treeserve_router.admission import tenant_label
from treeserve_router.auth import ApiKey, digest_of, file_line, new_key

TENANT, CLASS = "x-tenant", "x-class"
# What everybody may call.
OPEN_RPCS, OPEN_PATHS = "/grpc.health.v1.Health/", ("/healthz", "/readyz")
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Keys:
    """Three keys and the file that knows them."""

    file: Path
    acme: str
    other: str
    gateway: str

    def write(self, *, without: str = "") -> None:
        """Write the file."""
        known = [
            (self.acme, ApiKey(digest_of(self.acme), "acme", name="acme-ci")),
            (self.other, ApiKey(digest_of(self.other), "other")),
            (self.gateway, ApiKey(digest_of(self.gateway), "staff", trusted=True, name="gateway")),
        ]
        self.file.write_text("".join(file_line(entry) + "\n" for key, entry in known if key != without))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.yaml", new_key(), new_key(), new_key())
    made.write()
    return made


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="one", stopping=common.StoppingCriteria(max_tokens=2), **fields)


def realtime() -> pb.GenerateRequest:
    return request(service_level=common.ServiceLevel(service_class=common.SERVICE_CLASS_REALTIME))


Serving = tuple[RouterRig, httpx.AsyncClient]


@asynccontextmanager
async def serving(verifier: FakeVerifier, folder: Path, keys: Keys, **config: Any) -> AsyncIterator[Serving]:
    async with (
        fake_verifiers(verifier),
        running_router(folder, verifier.tokenizer, [verifier], api_keys_file=keys.file, **config) as rig,
        httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as http,
    ):
        yield rig, http


async def refusal(
    rig: RouterRig, metadata: Metadata, message: pb.GenerateRequest | None = None
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.generate(message or request(), metadata=metadata)
    return raised.value


async def post(http: httpx.AsyncClient, headers: Metadata = (), **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": "one", "max_tokens": 2, **fields}, headers=list(headers))


# --- Deny by default


async def first_answer(channel: grpc.aio.Channel, method: str, metadata: Metadata) -> grpc.StatusCode:
    """How a call of any kind with an empty message begins: OK for a message that comes back."""
    call = channel.unary_stream(method)(b"", metadata=metadata)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


async def test_every_rpc_but_health_needs_a_key(
    verifier: FakeVerifier, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: set[str] = set()
    add = grpc.aio.Server.add_generic_rpc_handlers

    def note(server: grpc.aio.Server, handlers: Sequence[Any]) -> None:
        served.update(method for handler in handlers for method in handler._method_handlers)
        add(server, handlers)

    monkeypatch.setattr("grpc.aio._server.Server.add_generic_rpc_handlers", note)
    async with serving(verifier, tmp_path, keys) as (rig, _):
        service = pb.DESCRIPTOR.services_by_name["InferenceService"]
        assert served >= {f"/{service.full_name}/{method.name}" for method in service.methods}
        assert any("reflection" in method for method in served)
        for method in [*served, "/no.such.Service/Method"]:
            for metadata in ((), bearer(new_key()), (("authorization", keys.acme),), bearer(keys.acme) * 2, bearer("")):
                answer = await first_answer(rig.channel, method, metadata)
                is_refused = answer is grpc.StatusCode.UNAUTHENTICATED
                assert is_refused != method.startswith(OPEN_RPCS), (method, answer)
        assert not verifier.submits

        error = await refusal(rig, ())
        assert "authorization: Bearer" in (error.details() or "")
        assert detail(error, error_details_pb2.ErrorInfo()).reason == "UNAUTHENTICATED"
        assert rig.metric("treeserve_router_rejections_total", reason="Unauthenticated") > 0
        status = await health_pb2_grpc.HealthStub(rig.channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.SERVING


async def test_every_route_but_health_needs_a_key(
    verifier: FakeVerifier, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes: list[Route] = []

    def build(parts: Any) -> Any:
        app = build_app(parts)
        routes.extend(app.routes)
        return app

    build_app = router_main.build_app
    monkeypatch.setattr(router_main, "build_app", build)
    async with serving(verifier, tmp_path, keys) as (_, http):
        assert {route.path for route in routes} > set(OPEN_PATHS)
        for route in [*routes, Route("/no/such/path", lambda _: None)]:
            path = route.path.replace("{name:path}", "tiny")
            for method in route.methods or {"GET"}:
                for headers in ([], list(bearer(new_key())), [("authorization", f"Basic {keys.acme}")]):
                    answer = await http.request(method, path, headers=headers)
                    if path in OPEN_PATHS:
                        assert answer.status_code == 200
                        continue
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        error = answer.json()["error"]
                        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                allowed = await http.request(method, path, headers=list(bearer(keys.acme)))
                assert allowed.status_code not in (401, 403), (method, path)
        assert "treeserve_router_verifiers" in (await http.get("/metrics", headers=list(bearer(keys.acme)))).text


async def test_without_a_file_nobody_needs_a_key(verifier: FakeVerifier, tmp_path: Path) -> None:
    async with fake_verifiers(verifier), running_router(tmp_path, verifier.tokenizer, [verifier]) as rig:
        assert (await rig.generate(request())).finished is not None
        assert (await rig.generate(request(), metadata=bearer("whatever"))).finished is not None


async def test_metrics_can_be_read_on_a_port_of_their_own(verifier: FakeVerifier, tmp_path: Path, keys: Keys) -> None:
    threads: list[threading.Thread] = []

    class Noting(Collector):
        def collect(self) -> Iterable[Metric]:
            threads.append(threading.current_thread())
            return [GaugeMetricFamily("only_here", "", 3)]

    async with (
        serving(verifier, tmp_path, keys, metrics_listen="127.0.0.1:0") as (rig, _),
        httpx.AsyncClient(base_url=f"http://{rig.metrics}", trust_env=False) as http,
    ):
        rig.registry.register(Noting())
        threads.clear()
        text = (await http.get("/metrics")).text
        assert "only_here 3.0" in text
        assert "treeserve_router_verifiers 1.0" in text
        assert threads == [threading.current_thread()]  # collectors look at what the event loop changes
        for path in ("/v1/models", "/readyz"):
            assert (await http.get(path)).status_code == 404


# --- Whose call it is, and what it may ask for


async def test_the_key_says_whose_the_call_is(verifier: FakeVerifier, tmp_path: Path, keys: Keys) -> None:
    async with serving(verifier, tmp_path, keys, tenant_header=TENANT) as (rig, http):
        await rig.generate(request(), metadata=bearer(keys.acme))
        assert verifier.submits[-1].tenant == tenant_label("acme")
        assert (await post(http, bearer(keys.other))).status_code == 200
        assert verifier.submits[-1].tenant == tenant_label("other")
        await rig.generate(request(), metadata=(*bearer(keys.acme), (TENANT, "acme")))  # true, so no harm

        lie = (TENANT, "other")
        for metadata in ((*bearer(keys.acme), lie), (*bearer(keys.acme), (TENANT, "acme"), lie)):
            assert (await refusal(rig, metadata)).code() is grpc.StatusCode.PERMISSION_DENIED
            answer = await post(http, metadata)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert len(verifier.submits) == 3

        await rig.generate(request(), metadata=(*bearer(keys.gateway), lie))
        assert verifier.submits[-1].tenant == tenant_label("other")
        assert (await post(http, bearer(keys.gateway))).status_code == 200
        assert verifier.submits[-1].tenant == tenant_label("staff")


async def test_only_trusted_keys_get_more_than_is_due(verifier: FakeVerifier, tmp_path: Path, keys: Keys) -> None:
    async with serving(verifier, tmp_path, keys, service_class_header=CLASS) as (rig, http):
        for message, metadata in (
            (realtime(), bearer(keys.acme)),
            (request(), (*bearer(keys.acme), (CLASS, "realtime"))),
            (request(), (*bearer(keys.acme), (CLASS, "batch"))),
        ):
            assert (await refusal(rig, metadata, message)).code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await post(http, bearer(keys.acme), service_class="realtime")).status_code == 403
        assert (await post(http, bearer(keys.acme), ttft_ms=1)).status_code == 403
        assert not verifier.submits

        await rig.generate(realtime(), metadata=bearer(keys.gateway))
        assert (await post(http, (*bearer(keys.gateway), (CLASS, "realtime")))).status_code == 200
        assert [s.service_level.service_class for s in verifier.submits] == [common.SERVICE_CLASS_REALTIME] * 2


async def test_a_tenant_is_told_of_its_own_requests_only(verifier: FakeVerifier, tmp_path: Path, keys: Keys) -> None:
    async with serving(verifier, tmp_path, keys, explain_requests=8) as (rig, _):
        await rig.generate(request(request_id="mine"), metadata=bearer(keys.acme))
        asked = pb.ExplainRequest(request_id="mine")
        assert (await rig.stub.Explain(asked, metadata=bearer(keys.acme))).request_id == "mine"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.stub.Explain(asked, metadata=bearer(keys.other))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


# --- The SDK, changed files, and what is logged


async def test_the_clients_bring_a_key_with_every_call(verifier: FakeVerifier, tmp_path: Path, keys: Keys) -> None:
    async with serving(verifier, tmp_path, keys) as (rig, _):
        async with sdk.AsyncClient(rig.grpc, api_key=keys.acme) as client:
            assert (await client.complete(prompt="one", max_tokens=2)).token_ids
            assert [model.name for model in await client.list_models()] == ["tiny"]
        for api_key in (None, new_key()):
            async with sdk.AsyncClient(rig.grpc, api_key=api_key) as client:
                with pytest.raises(sdk.Unauthenticated):
                    await client.complete(prompt="one", max_tokens=2)
                with pytest.raises(sdk.Unauthenticated):
                    await client.get_model("tiny")


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    verifier: FakeVerifier, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_S", 0.01)

    async def status(http: httpx.AsyncClient, key: str) -> int:
        return (await http.get("/v1/models", headers=list(bearer(key)))).status_code

    async def becomes(http: httpx.AsyncClient, key: str, expected: int) -> None:
        for _ in range(2000):
            if await status(http, key) == expected:
                return
        raise AssertionError(f"still {await status(http, key)}")

    async with serving(verifier, tmp_path, keys) as (_, http):
        assert await status(http, keys.acme) == 200
        keys.write(without=keys.acme)
        await becomes(http, keys.acme, 401)
        assert await status(http, keys.other) == 200
        with capture_logs() as logs:
            keys.file.write_text(f"- {{sha256: {keys.acme}, tenant: acme}}\n")
            while not any(line["log_level"] == "error" for line in logs):
                assert await status(http, keys.other) == 200
        assert "sha256 is not 64" in str(logs)
        assert keys.acme not in str(logs)
        assert await status(http, keys.other) == 200
        keys.write()
        await becomes(http, keys.acme, 200)


async def test_logs_name_the_key_and_never_hold_it(verifier: FakeVerifier, tmp_path: Path, keys: Keys) -> None:
    unknown = new_key()
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        async with serving(verifier, tmp_path, keys) as (rig, http):
            await rig.generate(request(), metadata=bearer(keys.acme))
            await post(http, bearer(keys.gateway))
            told = [(await refusal(rig, bearer(unknown))).details(), (await post(http, bearer(unknown))).text]
            told += [(await refusal(rig, (("authorization", unknown),))).details()]
            told += [(await post(http, bearer(keys.acme), prompt=5)).text]
    ended = [line["api_key"] for line in logs if line["event"] == "request ended"]
    assert ended == ["acme-ci", "gateway"]
    for key in (keys.acme, keys.other, keys.gateway, unknown):
        assert key not in json.dumps([logs, told], default=str)
