"""TLS of servers and channels: who is let in and who is not, files that change, and files that cannot be used."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from structlog.testing import capture_logs
from support.certificates import Authority

from treeserve_core.errors import InvalidArgumentError
from treeserve_router.http_server import HttpServer
from treeserve_wire.channel import open_channel
from treeserve_wire.config import ConfigError, load_config
from treeserve_wire.server import ServiceServer
from treeserve_wire.tls import Tls, TlsFiles, tls_from, with_hint

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Certificate and CA of somebody else."""
    folder = tmp_path_factory.mktemp("stranger")
    return Authority.make(folder).issue(folder / "certificate")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    return authority.issue(tmp_path / "certificate")


@asynccontextmanager
async def serving(tls: Tls | None, address: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[ServiceServer]:
    server = ServiceServer(address, "some.Service", tls=tls, **options)
    server.bound = await server.start()  # type: ignore[attr-defined]
    yield server
    await server.drain(0)


async def check(channel: grpc.aio.Channel) -> int:
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status)


async def refused(channel: grpc.aio.Channel) -> str:
    """What a client is told that is not let in."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await check(channel)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    return with_hint(raised.value.details() or "")


async def test_both_sides_show_certificates_of_one_ca(files: TlsFiles, stranger: TlsFiles) -> None:
    tls = Tls(files)
    async with serving(tls) as server:
        address = server.bound
        assert await check(open_channel(address, tls)) == SERVING
        assert "does it expect TLS" in await refused(open_channel(address))
        only_ca = grpc.ssl_channel_credentials(files.ca_file.read_bytes())
        assert "this side's certificate" in await refused(grpc.aio.secure_channel(address, only_ca))
        other = grpc.ssl_channel_credentials(
            files.ca_file.read_bytes(), stranger.key_file.read_bytes(), stranger.cert_file.read_bytes()
        )
        assert "this side's certificate" in await refused(grpc.aio.secure_channel(address, other))
        assert "comes from no CA of this side" in await refused(open_channel(address, Tls(stranger)))
        misnamed = Tls(replace(files, peer_name="verifier.serving.svc"))
        assert "tls.peer_name" in await refused(open_channel(address, misnamed))
    async with serving(None) as server:
        assert "the peer does not" in await refused(open_channel(server.bound, tls))


async def test_a_peer_is_known_by_a_configured_name_or_on_a_socket_as_this_machine(
    authority: Authority, tmp_path: Path
) -> None:
    named = authority.issue(tmp_path / "named", "DNS:verifier.serving.svc")
    async with serving(Tls(named)) as server:
        assert await check(open_channel(server.bound, Tls(replace(named, peer_name="verifier.serving.svc")))) == SERVING
    local = Tls(authority.issue(tmp_path / "local", "DNS:localhost"))
    async with serving(local, f"unix:{tmp_path}/s") as server:
        assert await check(open_channel(server.bound, local)) == SERVING


async def test_clients_without_a_certificate_can_be_let_in(files: TlsFiles) -> None:
    async with serving(Tls(files), client_certs=False) as server:
        credentials = grpc.ssl_channel_credentials(files.ca_file.read_bytes())
        assert await check(grpc.aio.secure_channel(server.bound, credentials)) == SERVING
        await refused(open_channel(server.bound))


async def test_probes_ask_a_plaintext_port_that_serves_nothing_but_health(files: TlsFiles) -> None:
    async with serving(Tls(files), health_address="127.0.0.1:0") as server:
        assert await check(open_channel(server.health_address)) == SERVING
        await server.set_serving(False)
        assert await check(open_channel(server.health_address)) == health_pb2.HealthCheckResponse.NOT_SERVING
        async with open_channel(server.health_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
                await reflect().read()
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_changed_files_hold_for_the_next_connection_on_either_side(
    files: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    server_tls, client_tls = Tls(files), Tls(files)
    successor = Authority.make(tmp_path, "successor")
    async with serving(server_tls) as server:
        running = open_channel(server.bound, client_tls)
        stub = health_pb2_grpc.HealthStub(running)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        new = Tls(successor.issue(files.cert_file.parent))
        assert await check(open_channel(server.bound, new)) == SERVING
        assert await check(open_channel(server.bound, client_tls)) == SERVING  # it has read them again, too
        before = Tls(authority.issue(tmp_path / "old"))
        await refused(open_channel(server.bound, before))
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING  # connections go on
        await running.close()


async def test_changed_files_that_cannot_be_used_are_reported_once_and_the_last_stay(
    files: TlsFiles, stranger: TlsFiles
) -> None:
    tls = Tls(files)
    async with serving(tls) as server:
        key = files.key_file.read_bytes()
        files.key_file.write_bytes(stranger.key_file.read_bytes())
        with capture_logs() as logs:
            assert await check(open_channel(server.bound, tls)) == SERVING
            assert await check(open_channel(server.bound, tls)) == SERVING
        (error,) = [line for line in logs if line["log_level"] == "error"]
        assert "tls.key_file" in error["reason"]
        files.key_file.write_bytes(key)
        with capture_logs() as logs:
            assert await check(open_channel(server.bound, tls)) == SERVING
        assert [line["log_level"] for line in logs] == ["info"]


# --- HTTP


async def certificate_over_http(address: str, client: ssl.SSLContext) -> bytes:
    """What the server shows, once it has answered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client)
    try:
        writer.write(b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status = await reader.readline()
        if not status:
            raise ConnectionError("hung up")
        assert b"404" in status
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(shown, bytes)
        return shown
    finally:
        writer.close()


def client_context(trusts: TlsFiles, shows: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusts.ca_file)
    if shows is not None:
        context.load_cert_chain(shows.cert_file, shows.key_file)
    return context


@pytest.mark.parametrize("client_certs", [False, True])
async def test_https_follows_changed_files(
    files: TlsFiles, stranger: TlsFiles, tmp_path: Path, client_certs: bool
) -> None:
    http = HttpServer(Starlette(), "127.0.0.1:0", 1.0, Tls(files).http_context(client_certs=client_certs))
    address = await http.start()
    before = await certificate_over_http(address, client_context(files, files if client_certs else None))
    outsiders = [client_context(files), client_context(files, stranger)] if client_certs else [client_context(stranger)]
    for outsider in outsiders:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await certificate_over_http(address, outsider)
    new = Authority.make(tmp_path, "successor").issue(files.cert_file.parent)
    after = await certificate_over_http(address, client_context(new, new if client_certs else None))
    assert after == ssl.PEM_cert_to_DER_cert(new.cert_file.read_text()) != before
    await http.drain()


async def ask_again(address: str, client: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Ask over HTTPS, taking up a session if there is one; returns the one to take up next."""

    def ask() -> ssl.SSLSession | None:
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            client.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            if b"404" not in b"".join(iter(lambda: connection.recv(1000), b"")):
                raise ConnectionError("hung up")
            taken_up = connection.session
            connection.unwrap()  # servers forget sessions that end otherwise
            return taken_up

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("option", [0, ssl.OP_NO_TICKET])
async def test_no_session_outlives_the_ca_of_its_client(
    files: TlsFiles, tmp_path: Path, version: ssl.TLSVersion, option: int
) -> None:
    http = HttpServer(Starlette(), "127.0.0.1:0", 1.0, Tls(files).http_context(client_certs=True))
    address = await http.start()
    client = client_context(files, files)
    client.minimum_version = client.maximum_version = version
    client.options |= option
    session = await ask_again(address, client, None)
    new = Authority.make(tmp_path, "successor").issue(files.cert_file.parent)
    client.load_verify_locations(new.ca_file)  # the client trusts the new CA, and has a certificate of the old one
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await ask_again(address, client, session)
    welcome = client_context(new, new)
    welcome.minimum_version = welcome.maximum_version = version
    await ask_again(address, welcome, None)
    await http.drain()


# --- Files that cannot be used


def test_files_that_cannot_be_used_are_refused_by_name(files: TlsFiles, stranger: TlsFiles, tmp_path: Path) -> None:
    nowhere, text = tmp_path / "nowhere", tmp_path / "text"
    text.write_text("no PEM")
    for wrong, named in [
        ({"cert_file": nowhere}, f"tls.cert_file: {nowhere}: No such file"),
        ({"key_file": nowhere}, f"tls.key_file: {nowhere}: No such file"),
        ({"ca_file": nowhere}, f"tls.ca_file: {nowhere}: No such file"),
        ({"cert_file": text}, f"tls.cert_file: {text}: holds no PEM certificate"),
        ({"key_file": text}, f"tls.key_file: {text}: holds no PEM key"),
        ({"ca_file": text}, f"tls.ca_file: {text}: holds no PEM certificate"),
        ({"key_file": stranger.key_file}, f"tls.key_file: {stranger.key_file}: is not the key of {files.cert_file}"),
        ({"ca_file": stranger.ca_file}, f"tls.cert_file: {files.cert_file}: fails against {stranger.ca_file}"),
    ]:
        with pytest.raises(InvalidArgumentError) as raised:
            Tls(replace(files, **wrong))
        assert named in str(raised.value)


def test_comments_of_a_ca_file_may_be_in_any_language(files: TlsFiles) -> None:
    files.ca_file.write_bytes("# Főtanúsítvány\n".encode() + files.ca_file.read_bytes())
    Tls(files)


def test_files_that_are_swapped_while_they_are_read_are_read_again(
    files: TlsFiles, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes
    swapped: list[Path] = []

    def swapping(path: Path) -> bytes:
        content = read(path)
        if path == files.cert_file and not swapped:
            swapped.append(path)
            authority.issue(files.cert_file.parent)
        return content

    monkeypatch.setattr(Path, "read_bytes", swapping)
    material = Tls(files)._current()
    assert (material.cert, material.key) == (read(files.cert_file), read(files.key_file))


def test_an_expired_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="certificate has expired"):
        Tls(authority.issue(tmp_path / "expired", days=-1))


def test_half_a_configuration_is_refused() -> None:
    assert tls_from({}) is None
    with pytest.raises(InvalidArgumentError, match=r"tls\.ca_file: is missing"):
        tls_from({"cert_file": "a", "key_file": "b"})
    with pytest.raises(InvalidArgumentError, match="password"):
        tls_from({"password": "x"})


@pytest.mark.parametrize("role", ["router", "verifier", "speculator"])
def test_every_service_reads_it_from_a_flag_or_a_variable(role: str) -> None:
    from treeserve_router.config import RouterConfig
    from treeserve_speculator.config import SpeculatorConfig
    from treeserve_verifier.config import VerifierConfig

    kinds: dict[str, type[Any]] = {"router": RouterConfig, "verifier": VerifierConfig, "speculator": SpeculatorConfig}
    kind = kinds[role]
    flags = ["--model-folder=m", "--model-name=m"]
    text = "{cert_file: c.crt, key_file: k.key, ca_file: ca.crt}"
    expected = TlsFiles(Path("c.crt"), Path("k.key"), Path("ca.crt"))
    assert load_config(kind, [*flags, f"--tls={text}"], {}).tls == expected
    assert load_config(kind, flags, {"TREESERVE_TLS": text}).tls == expected
    assert load_config(kind, flags, {}).tls is None
    with pytest.raises(ConfigError, match=r"tls\.key_file"):
        load_config(kind, [*flags, "--tls={cert_file: c}"], {})
