"""TLS of one process, as a server and as a client, from files that are read again when they change."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.config import merged, option
from treeserve_wire.file_watch import FileWatch

_FILES = ("cert_file", "key_file", "ca_file")
# Files that change while they are read are read again, so often in all.
_READS = 3

# What gRPC says when two sides do not come to terms, and what to look at then.
_HINTS = (
    ("CERTIFICATE_VERIFY_FAILED", "the peer's certificate has expired, or comes from no CA of this side's tls.ca_file"),
    (
        "Hostname Verification",
        "the peer's certificate lacks the name it is called by; tls.peer_name says which that is",
    ),
    ("WRONG_VERSION_NUMBER", "this side speaks TLS and the peer does not; either both have `tls` or none"),
    (
        "failed to connect to all addresses; last error: UNAVAILABLE:",
        "the peer hung up at once: does it expect TLS, and does this side's certificate come from its tls.ca_file?",
    ),
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one process.

    Attributes:
        cert_file: its certificate, followed by intermediate ones; it shows it as a server and as a client.
        key_file: the certificate's private key, not encrypted.
        ca_file: CAs that peers' certificates must come from, and its own.
        peer_name: DNS name that the certificate of a called peer must carry; empty: the host in the peer's address,
            "localhost" for a Unix socket.
    """

    cert_file: Path = Path()
    key_file: Path = Path()
    ca_file: Path = Path()
    peer_name: str = ""


def tls_from(value: Mapping[str, Any]) -> TlsFiles | None:
    """TLS from configuration: the fields of `TlsFiles`, or nothing for none.

    Raises:
        InvalidArgumentError: for an unknown or a missing field.
    """
    if not value:
        return None
    files = merged(TlsFiles(), value, "tls")
    for name in _FILES:
        if not value.get(name):
            raise InvalidArgumentError(f"tls.{name}", f"is missing; TLS needs all of {', '.join(_FILES)}")
    return files


TLS_OPTION = option(
    "mutual TLS: a mapping of cert_file, key_file, ca_file (PEM), and peer_name, the name that called peers' "
    "certificates carry if not the host of their address; files are read again when they change",
    tls_from,
)


@dataclass(frozen=True)
class _Material:
    """What the files held, checked.

    Attributes:
        context: of a server that shows the certificate and accepts clients of the CA.
    """

    cert: bytes
    key: bytes
    ca: bytes
    context: ssl.SSLContext


class Tls:
    """Credentials of a process. Threads may share it.

    Changed files hold for connections from then on; those that cannot be used are reported, and the last that could
    stay in force.

    Raises:
        InvalidArgumentError: if the files cannot be used together; it names the one at fault.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watch = FileWatch(files.cert_file, files.key_file, files.ca_file)
        self._lock = threading.Lock()
        self._watch.changed()
        self._material = _read(files)

    @classmethod
    def of(cls, files: TlsFiles | None) -> Tls | None:
        """The credentials of configured files; None for plaintext. Raises InvalidArgumentError."""
        return None if files is None else cls(files)

    @property
    def peer_name(self) -> str:
        """Name that called peers' certificates carry; empty for the host of their address."""
        return self._files.peer_name

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel: it keeps what the files hold now."""
        now = self._current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def server_credentials(self, *, client_certs: bool) -> grpc.ServerCredentials:
        """For a server, which asks at each new connection what the files hold.

        Args:
            client_certs: clients without a certificate of the CA are refused.
        """
        served = self._current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            now = self._current()
            if now is served:
                return None
            served = now
            return _grpc_configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(served),
            newer,  # type: ignore[arg-type]  # the stubs know nothing of None for "as before"
            require_client_authentication=client_certs,
        )

    def http_context(self, *, client_certs: bool) -> ssl.SSLContext:
        """The same for a server of asyncio."""

        def newest() -> ssl.SSLContext:
            context = self._current().context
            context.verify_mode = ssl.CERT_REQUIRED if client_certs else ssl.CERT_NONE
            return context

        return _Following(newest)

    def _current(self) -> _Material:
        with self._lock:
            if self._watch.changed():
                try:
                    self._material = _read(self._files)
                except InvalidArgumentError as error:
                    _log.error("changed TLS files cannot be used; the last ones stay in force", reason=str(error))
                else:
                    _log.info("TLS files changed", cert_file=str(self._files.cert_file))
            return self._material


class _Following(ssl.SSLContext):
    """Gives each connection of asyncio the newest context.

    Sessions belong to the context they began in: with new files none is resumed, and each client is checked anew.
    """

    def __new__(cls, _newest: Callable[[], ssl.SSLContext]) -> _Following:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, newest: Callable[[], ssl.SSLContext]) -> None:
        self._newest = newest

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """A connection."""
        return self._newest().wrap_bio(*args, **kwargs)


def with_hint(reason: str) -> str:
    """The reason why a connection failed, and what to look at if TLS may have been it."""
    hint = next((hint for sign, hint in _HINTS if sign in reason), None)
    return reason if hint is None else f"{reason} ({hint})"


def _grpc_configuration(material: _Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)


def _read(files: TlsFiles) -> _Material:
    """What the files hold, all of it of one time. Raises InvalidArgumentError."""
    watch = FileWatch(files.cert_file, files.key_file, files.ca_file)
    watch.changed()
    for _ in range(_READS):
        try:
            material = _read_once(files)
        except InvalidArgumentError:
            if not watch.changed():
                raise
        else:
            if not watch.changed():
                return material
    raise InvalidArgumentError("tls.cert_file", f"{files.cert_file}: it or another file changes again and again")


def _read_once(files: TlsFiles) -> _Material:
    cert, key, ca = (_bytes(name, getattr(files, name)) for name in _FILES)
    _check_pem("cert_file", files.cert_file, cert)
    _check_pem("ca_file", files.ca_file, ca)
    server = _context(ssl.PROTOCOL_TLS_SERVER, files, ca)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files, ca)
    try:
        _shake_hands(client, server)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", error.reason)
        raise InvalidArgumentError(
            "tls.cert_file", f"{files.cert_file}: fails against {files.ca_file}: {why}"
        ) from None
    return _Material(cert, key, ca, server)


def _bytes(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"tls.{name}", f"{path}: {error.strerror}") from error


def _check_pem(name: str, path: Path, content: bytes) -> None:
    try:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), content)
    except (ssl.SSLError, ValueError):
        raise InvalidArgumentError(f"tls.{name}", f"{path}: holds no PEM certificate, or a damaged one") from None


def _context(protocol: int, files: TlsFiles, ca: bytes) -> ssl.SSLContext:
    """A side that shows the certificate and demands one of the CA."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: an intermediate CA may be the trusted one
    _trust(context, ca)
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password="")  # asks nobody for one
    except (ssl.SSLError, OSError) as error:
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        why = f"is not the key of {files.cert_file}" if mismatch else "holds no PEM key, or an encrypted one"
        raise InvalidArgumentError("tls.key_file", f"{files.key_file}: {why}") from None
    return context


def _trust(context: ssl.SSLContext, pem: bytes) -> None:
    """Take these certificates for CAs. Raises SSLError or ValueError."""
    context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))  # names beside certificates may be UTF-8


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """What peers would do with the certificate, in memory. Raises SSLError where one of them would refuse it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for _ in range(3):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
