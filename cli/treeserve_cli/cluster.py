"""The whole of treeserve on one machine: an embedded Valkey, verifiers, speculators and a router as child processes."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treeserve_cli.layout import ROLES, ClusterConfig, Layout, process_specs
from treeserve_cli.supervisor import Child, RestartPolicy, Supervisor
from treeserve_client import TLS, Client, TreeserveClientError, Unauthenticated
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_wire.tls import Tls

_HOST = "127.0.0.1"
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_LOG_TAIL_CHARS = 2000


class ClusterError(RuntimeError):
    """The cluster could not be brought up; the message says why."""


class LocalCluster:
    """A cluster of local processes: ``with LocalCluster(config) as cluster`` starts it and waits until it serves.

    Args:
        report: told in one line each what happens, from several threads.

    Attributes:
        grpc_addresses, http_addresses: the routers', "host:port" each.
        grpc_address: all of them, as the SDK takes them.
        http_address: the first router's.
        run_dir: holds a log for each process, ``<role>-<index>.log``. A temporary one goes away with a cluster in
            which nothing crashed.
    """

    def __init__(self, config: ClusterConfig, report: Callable[[str], None] = lambda _line: None) -> None:
        self.config = config
        self.grpc_addresses = _addresses(config.grpc_port, config.routers)
        self.http_addresses = _addresses(config.http_port, config.routers)
        self.grpc_address = ",".join(self.grpc_addresses)
        self.http_address = self.http_addresses[0]
        run_dir = config.run_dir or Path(tempfile.gettempdir()) / f"treeserve-{secrets.token_hex(4)}"
        self.run_dir = run_dir.absolute()  # Valkey changes its working folder
        self._report = report
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def processes(self) -> Mapping[str, tuple[Child, ...]]:
        """The children by role: valkey, verifier, speculator, router. Empty before `start`."""
        children = self._supervisor.children if self._supervisor is not None else ()
        return {role: tuple(child for child in children if child.spec.role == role) for role in ROLES}

    def client(self, address: str | None = None) -> Client:
        """A client of one router, or of all of them."""
        return Client(address or self.grpc_address, api_key=self.config.api_key, tls=self._tls)

    def kill(self, role: str, index: int = 0) -> None:
        """SIGKILL one process; it is restarted unless the configuration says otherwise."""
        self.processes[role][index].kill()

    def start(self) -> None:
        """Prepare the model, start all processes and wait until each router serves with every verifier.

        Raises:
            ClusterError: if a port is taken, a process exits or time runs out. Nothing is left running then.
            InvalidArgumentError: if the model cannot be served, or a file of `tls` not be used.
        """
        # Whoever has the port, another cluster perhaps, would be taken for this one's router.
        _check_free(*self.grpc_addresses, *self.http_addresses)
        Tls.of(self.config.tls)
        layout = Layout(self.run_dir, self._prepare_model(), self.grpc_addresses, self.http_addresses)
        # A process that exits during the start ends it.
        self._supervisor = Supervisor(process_specs(self.config, layout), RestartPolicy(enabled=False), self._report)
        try:
            self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._report(f"logs in {self.run_dir}")
            self._supervisor.start()
            self._wait_ready(self._supervisor.children)
        except Exception:
            self._supervisor.stop()  # the logs stay: they say more
            raise
        except BaseException:
            self.stop()
            raise
        self._supervisor.policy = RestartPolicy(enabled=not self.config.no_restart)

    def stop(self) -> None:
        """Stop routers, speculators, verifiers and Valkey in this order; returns when none is left."""
        if self._supervisor is None:
            return
        try:
            self._supervisor.stop()
        finally:  # whoever interrupts this wants to be gone, and the children go with this process
            if self.config.run_dir is None and all(child.exit_code is None for child in self._supervisor.children):
                shutil.rmtree(self.run_dir, ignore_errors=True)

    def _prepare_model(self) -> Path:
        return prepare_checkpoint(self.config.model_source, self.config.cache_dir, self._report)

    def _wait_ready(self, children: tuple[Child, ...]) -> None:
        until = time.monotonic() + self.config.ready_timeout_s
        for address in self.grpc_addresses:
            with self.client(address) as client, self._channel(address) as channel:
                while not (self._serves_model(client) and _is_healthy(channel)):
                    self._check_starting(children, until)
                    time.sleep(_POLL_S)

    @property
    def _tls(self) -> TLS | None:
        """What the routers' clients need: the certificate is known by the peers' name, or as this machine's."""
        files = self.config.tls
        if files is None:
            return None
        return TLS(files.ca_file, files.cert_file, files.key_file, files.peer_name or "localhost")

    def _channel(self, address: str) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(address)
        return grpc.secure_channel(address, self._tls.credentials(), options=self._tls.options(address))

    def _check_starting(self, children: tuple[Child, ...], until: float) -> None:
        for child in children:
            if child.exit_code is not None:
                raise ClusterError(f"{child.spec.name} exited with {child.exit_code}:\n{_tail(child.spec.log)}")
        if time.monotonic() > until:
            raise ClusterError(f"not ready after {self.config.ready_timeout_s:g} s; see {self.run_dir}")

    def _serves_model(self, client: Client) -> bool:
        try:
            models = client.list_models(deadline_s=_PROBE_TIMEOUT_S)
        except Unauthenticated as error:
            raise ClusterError(f"{error}; set TREESERVE_API_KEY to a key of the routers' api_keys_file") from error
        except TreeserveClientError:
            return False
        wanted = (self.config.served_name, self.config.verifiers, self.config.speculators)
        return any((model.name, model.verifiers, model.speculators) == wanted for model in models)


def _is_healthy(channel: grpc.Channel) -> bool:
    request = health_pb2.HealthCheckRequest(service="")
    try:
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_PROBE_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]


def _check_free(*addresses: str) -> None:
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_server((host, int(port))).close()
        except OSError as error:
            raise ClusterError(f"cannot listen on {address}: {error.strerror}") from error


def _addresses(first_port: int, count: int) -> tuple[str, ...]:
    """Addresses of processes of one kind; with port 0 at ports that are free now."""
    ports = range(first_port, first_port + count) if first_port else _free_ports(count)
    return tuple(f"{_HOST}:{port}" for port in ports)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # held together, so that they differ
        listeners = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
