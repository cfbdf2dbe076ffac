"""A gRPC server as every treeserve service runs it: limits, keepalive, health, reflection and draining."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from treeserve_wire.channel import COMMON_OPTIONS, MAX_MESSAGE_BYTES
from treeserve_wire.decoding import DecodingInterceptor
from treeserve_wire.tls import Tls

# Health is SERVING under this name for as long as the process works, whether or not it has anything to serve with:
# a router without verifiers is not ready, but starting it again would not help.
LIVENESS = "live"

# A connection past its age is told to leave; its calls may run on for this long, longer than any generation.
_AGE_GRACE_MS = 3_600_000

_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # In a burst gRPC itself would cancel calls that this process has not looked at yet, from the thousandth on; they
    # are to hear a reason and when to try again.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    # Without this a second process could bind the same port and take every other connection.
    ("grpc.so_reuseport", 0),
)


ServicerContext = grpc.aio.ServicerContext[Any, Any]


async def write_all(context: ServicerContext, frames: AsyncIterator[Any]) -> None:
    """Write frames as they come, until cancelled or the stream breaks."""
    async for frame in frames:
        await context.write(frame)


class ServiceServer:
    """A `grpc.aio` server on "host:port" (port 0 picks one) or "unix:/path". Build it inside the event loop.

    Args:
        service_name: full name, for example ``treeserve.verifier.v1.VerifierService``; health is kept under it and "",
            and that of the process itself under `LIVENESS`.
        reflection: serve the reflection API.
        max_receive_bytes: longest message a caller may send.
        max_connection_age_ms: ask clients to reconnect after this time, so that they find new replicas. Only for
            services of short calls: a stream that outlives the age by an hour is cut.
        tls: speaks TLS with these credentials; plaintext without.
        client_certs: under TLS, clients without a certificate of the CA are refused.
        health_address: a second, plaintext address of the health service, for probes that know no TLS; empty for none.
        interceptors: see every call but those of `health_address`.

    Attributes:
        grpc: the aio server to add servicers to before `start`.
        probed: that of `health_address`, likewise: for what the platform asks, which no interceptor sees; None without.
        health_address: once started, the bound one.
    """

    def __init__(
        self,
        address: str,
        service_name: str,
        *,
        reflection: bool = True,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        max_connection_age_ms: int | None = None,
        tls: Tls | None = None,
        client_certs: bool = True,
        health_address: str = "",
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        options = [*_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)]
        if max_connection_age_ms is not None:
            options.append(("grpc.max_connection_age_ms", max_connection_age_ms))
            options.append(("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS))
        self.grpc = grpc.aio.server(options=options, interceptors=(*interceptors, DecodingInterceptor()))
        self.health_address = health_address
        self.probed = (
            grpc.aio.server(options=_OPTIONS, interceptors=(DecodingInterceptor(),)) if health_address else None
        )
        self._address = address
        self._credentials = None if tls is None else tls.server_credentials(client_certs=client_certs)
        self._health_names = ("", service_name)
        self._health = health.aio.HealthServicer()
        for server in filter(None, (self.grpc, self.probed)):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if reflection:
            _add_reflection(self.grpc, {service_name, health.SERVICE_NAME})

    async def start(self, *, serving: bool = True) -> str:
        """Bind and serve; returns the bound address. Health is SERVING unless `serving` is false.

        Raises:
            OSError: if the address cannot be bound.
        """
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(serving)
        address = _bind(self.grpc, self._address, self._credentials)
        if self.probed is not None:
            self.health_address = _bind(self.probed, self.health_address, None)
            await self.probed.start()
        await self.grpc.start()
        return address

    async def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING. Without effect once draining."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._health_names:
            await self._health.set(name, status)

    async def drain(self, grace_s: float) -> None:
        """Report NOT_SERVING for good, refuse new calls, and give running ones `grace_s` seconds to end."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        if self.probed is not None:
            await self.probed.stop(0)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """The bound address. Raises OSError."""
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _add_reflection(server: grpc.aio.Server, service_names: set[str]) -> None:
    reflection.enable_server_reflection(sorted({*service_names, reflection.SERVICE_NAME}), server)
