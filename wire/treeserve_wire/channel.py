"""Client channels between treeserve's own services."""

from __future__ import annotations

import grpc

from treeserve_wire.tls import Tls

MAX_MESSAGE_BYTES = 1 << 20

# Of both ends.
COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What gRPC really goes by when a keepalive ping stays unanswered; its own default is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # An idle stream goes on pinging: middleboxes cut silent connections, and a dead peer must be noticed.
    ("grpc.http2.max_pings_without_data", 0),
    # Credits bound what is in flight. Bandwidth probing would widen the window until a slow reader holds megabytes.
    ("grpc.http2.bdp_probe", 0),
)

_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Peers of one cluster are never behind a forward proxy; an inherited http_proxy must not catch loopback traffic.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Open a channel to "host:port" or "unix:/path", for one peer's long streams; reuse it.

    Args:
        tls: speaks TLS with these credentials, as they are now; plaintext without.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    name = tls.peer_name or ("localhost" if address.startswith("unix:") else "")
    named = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=(*_OPTIONS, *named))
