"""The router's configuration, fully resolved before anything is built."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.config import check_at_least, option

_HEADER_NAME = re.compile(r"[a-z0-9-]*")
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True)
class RouterConfig:
    """One router process. Fields load from YAML, TREESERVE_* variables and flags (treeserve_wire.config).

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    model_folder: Path = field(metadata=option("folder of the served model; only its tokenizer and config are read"))
    model_name: str = field(metadata=option("served model name, the same as the verifiers'"))
    listen: str = field(default="127.0.0.1:50051", metadata=option("gRPC address, host:port or unix:/path"))
    http_listen: str = field(default="127.0.0.1:8000", metadata=option("HTTP address, host:port; empty is off"))
    verifiers: tuple[str, ...] = field(
        default=("127.0.0.1:50052",), metadata=option("verifier addresses: host:port, unix:/path, or dns://name:port")
    )
    redis_url: str | None = field(default=None, metadata=option("Redis or Valkey URL; empty is off"))
    router_id: str = field(default_factory=socket.gethostname, metadata=option("name in logs and hellos"))
    max_queued_requests: int = field(default=1024, metadata=option("requests that may wait, beyond which: refused"))
    max_queued_tokens: int = field(default=1 << 20, metadata=option("prompt tokens that may wait, likewise"))
    verifier_wait_s: float = field(default=10.0, metadata=option("longest wait while no verifier can serve at all"))
    max_replays: int = field(default=5, metadata=option("failures in a row without a new token that end a request"))
    token_credit: int = field(default=64, metadata=option("token frames a verifier may have in flight"))
    session_ttl_s: float = field(default=1800.0, metadata=option("time a session's verifier is remembered"))
    tenant_header: str = field(
        default="",
        metadata=option(
            "header or gRPC metadata in which an authenticating gateway names the tenant; it must drop what clients "
            "send under that name. Requests without it leave nothing behind for others. Empty: all are one tenant's"
        ),
    )
    drain_s: float = field(default=30.0, metadata=option("time to finish running streams after SIGTERM"))
    reflection: bool = field(default=True, metadata=option("serve gRPC reflection"))
    log_level: str = field(default="info", metadata=option("debug, info, warning or error"))
    otlp_endpoint: str | None = field(default=None, metadata=option("OpenTelemetry collector; empty is off"))

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_queued_requests", "max_queued_tokens", "max_replays", "token_credit")
        for name in ("verifier_wait_s", "session_ttl_s", "drain_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidArgumentError(name, "must be a number of seconds, not negative")
        if self.session_ttl_s < 1:
            raise InvalidArgumentError("session_ttl_s", "must be at least 1 s")
        if self.redis_url is not None and not self.redis_url.startswith(_REDIS_SCHEMES):
            raise InvalidArgumentError("redis_url", f"begins with none of {', '.join(_REDIS_SCHEMES)}")
        if not _HEADER_NAME.fullmatch(self.tenant_header):
            raise InvalidArgumentError("tenant_header", "is no lower-case header name")
        if not self.model_name:
            raise InvalidArgumentError("model_name", "is empty")
