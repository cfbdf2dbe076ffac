"""The three services under TLS: a generation with drafts end to end, who is refused where, and changed certificates."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from support.certificates import Authority
from support.fake_verifier import FakeVerifier, fake_verifiers
from support.router_rig import running_router
from support.speculators import drafting
from support.verifier_peers import running_verifier
from support.waiting import until

import treeserve_client as sdk
from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.channel import open_channel
from treeserve_wire.tls import Tls, TlsFiles


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    return authority.issue(tmp_path / "certificate")


def client_tls(files: TlsFiles) -> sdk.TLS:
    return sdk.TLS(ca_file=files.ca_file)


async def test_a_generation_with_drafts_crosses_three_services_in_tls(
    tiny_model: Path, tmp_path: Path, files: TlsFiles, authority: Authority
) -> None:
    prompt = "one two one two one two one two"
    tokenizer = Tokenizer.from_folder(tiny_model)
    plain = tmp_path / "plain"
    plain.mkdir()
    async with (
        running_verifier(tiny_model, plain) as verifier,
        running_router(plain, tokenizer, [verifier]) as rig,
        sdk.AsyncClient(rig.grpc) as client,
    ):
        expected = await client.complete(prompt=prompt, max_tokens=24)

    async with (
        running_verifier(tiny_model, tmp_path, tls=files, health_listen="127.0.0.1:0") as verifier,
        drafting(verifier, tiny_model, "suffix", tls=files),
        running_router(tmp_path, tokenizer, [verifier], tls=files, listen="127.0.0.1:0") as rig,
        sdk.AsyncClient(rig.grpc, tls=client_tls(files)) as client,
    ):
        assert (await client.complete(prompt=prompt, max_tokens=24)).token_ids == expected.token_ids
        answer = await client.complete(prompt=prompt, max_tokens=24)  # the speculator remembers the first one
        assert answer.token_ids == expected.token_ids
        assert answer.speculation.accepted > 0
        assert [model.speculators for model in await client.list_models()] == [1]
        with sdk.Client(rig.grpc, tls=client_tls(files)) as blocking:
            assert await asyncio.to_thread(blocking.list_models) == await client.list_models()
        trusting = ssl.create_default_context(cafile=files.ca_file)
        async with httpx.AsyncClient(base_url=f"https://{rig.http}", verify=trusting, trust_env=False) as http:
            response = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0})
            assert response.json()["choices"][0]["text"] == answer.text

        # Who has no certificate of the CA speaks to no verifier, and plaintext is heard nowhere but for health.
        only_ca = grpc.ssl_channel_credentials(files.ca_file.read_bytes())
        localhost = (("grpc.ssl_target_name_override", "localhost"),)
        stranger = Tls(Authority.make(tmp_path, "other").issue(tmp_path / "stranger"))
        for channel in (
            open_channel(verifier.address),
            open_channel(verifier.address, stranger),
            grpc.aio.secure_channel(verifier.address, only_ca, options=localhost),
            open_channel(rig.grpc),
        ):
            async with channel:
                call = verifier_pb2_grpc.VerifierServiceStub(channel).Decode()
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.write(verifier_pb2.DecodeRequest())
                    await call.read()
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        async with sdk.AsyncClient(rig.grpc, max_resumes=0) as in_the_clear:
            with pytest.raises(sdk.Unavailable):
                await in_the_clear.list_models()
        async with open_channel(verifier.verifier.server.health_address) as probe:
            status = await health_pb2_grpc.HealthStub(probe).Check(health_pb2.HealthCheckRequest())
            assert status.status == health_pb2.HealthCheckResponse.SERVING

        # A speculator and a router that are new meet the successors of their certificates.
        authority.issue(files.cert_file.parent)
        async with drafting(verifier, tiny_model, "ngram", tls=files):
            assert (await client.complete(prompt=prompt, max_tokens=24)).token_ids == expected.token_ids


async def test_a_router_can_demand_certificates_of_clients(
    tmp_path: Path, verifier: FakeVerifier, files: TlsFiles
) -> None:
    options = {"tls": files, "require_client_certs": True, "listen": "127.0.0.1:0", "health_listen": "127.0.0.1:0"}
    async with running_router(tmp_path, verifier.tokenizer, [], **options) as rig:
        full = sdk.TLS(files.ca_file, files.cert_file, files.key_file)
        async with sdk.AsyncClient(rig.grpc, tls=full) as client:
            assert await client.list_models() == []
        async with sdk.AsyncClient(rig.grpc, tls=client_tls(files)) as client:
            with pytest.raises(sdk.Unavailable):
                await client.list_models()
        context = ssl.create_default_context(cafile=files.ca_file)
        async with httpx.AsyncClient(base_url=f"https://{rig.http}", verify=context, trust_env=False) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/healthz")
        context.load_cert_chain(files.cert_file, files.key_file)
        async with httpx.AsyncClient(base_url=f"https://{rig.http}", verify=context, trust_env=False) as http:
            assert (await http.get("/healthz")).status_code == 200


async def test_a_router_that_is_not_understood_says_what_to_look_at_and_tries_again(
    tmp_path: Path, verifier: FakeVerifier, files: TlsFiles
) -> None:
    async with fake_verifiers(verifier):
        with capture_logs() as logs:
            async with running_router(tmp_path, verifier.tokenizer, [], tls=files, verifiers=(verifier.address,)):
                failures = lambda: [line for line in logs if line["event"] == "verifier not connected"]  # noqa: E731
                await until(lambda: len(failures()) >= 2)
        assert "the peer does not; either both have `tls`" in failures()[0]["reason"]
        assert verifier.hello is None


def test_client_files_are_refused_where_they_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        sdk.TLS(cert_file="a")
    with pytest.raises(OSError, match="nowhere"):
        sdk.Client("localhost:1", tls=sdk.TLS(ca_file=tmp_path / "nowhere"))
