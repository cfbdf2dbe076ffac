"""The router's configuration, fully resolved before anything is built."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_router.qos import Policies, ServiceLevels, class_named, policies_from
from treeserve_router.queue import DEFAULT_MAX_BYTES
from treeserve_router.tenants import TenantPolicy, tenants_from
from treeserve_wire.config import check_at_least, option
from treeserve_wire.tls import TLS_OPTION, TlsFiles

QUEUE_POLICIES = ("qos", "fifo")

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
    health_listen: str = field(
        default="", metadata=option("plaintext address of the gRPC health service, for probes under TLS; empty is off")
    )
    metrics_listen: str = field(
        default="",
        metadata=option(
            "plaintext Prometheus address, host:port, that needs no API key; empty: /metrics of HTTP alone"
        ),
    )
    verifiers: tuple[str, ...] = field(
        default=("127.0.0.1:50052",),
        metadata=option(
            "verifier addresses: host:port, unix:/path, dns://name:port for all addresses behind a name, or "
            "kubernetes://namespace/service:port for the ready pods of a Service, watched through the Kubernetes API"
        ),
    )
    redis_url: str | None = field(default=None, metadata=option("Redis or Valkey URL; empty is off"))
    router_id: str = field(default_factory=socket.gethostname, metadata=option("name in logs and hellos"))
    max_queued_requests: int = field(default=1024, metadata=option("requests that may wait, beyond which: refused"))
    max_queued_tokens: int = field(default=1 << 20, metadata=option("prompt tokens that may wait, likewise"))
    max_queued_bytes: int = field(default=DEFAULT_MAX_BYTES, metadata=option("memory of what may wait, likewise"))
    queue_policy: str = field(
        default="qos", metadata=option("qos: by service level and fair shares; fifo: in order of arrival")
    )
    ageing_s: float = field(
        default=10.0, metadata=option("wait after which a class gets its weight's share beside more urgent ones")
    )
    qos: Policies = field(
        default_factory=lambda: DEFAULT_POLICIES,
        metadata=option(
            "service classes: a mapping of class to ttft_ms, tpot_ms, weight, reserved_slots, preemptible, sheddable, "
            "max_nodes, as far as they are to differ from the defaults",
            policies_from,
        ),
    )
    default_service_class: str = field(default="standard", metadata=option("class of requests of which nobody says"))
    service_class_header: str = field(
        default="",
        metadata=option(
            "header or gRPC metadata in which a gateway names the class that a request is due; like tenant_header"
        ),
    )
    trust_clients: bool | None = field(
        default=None,
        metadata=option(
            "clients may ask for a more urgent class, or tighter targets, than they are due. If empty: only where no "
            "gateway is configured (tenant_header, service_class_header); with api_keys_file each key says it"
        ),
    )
    tenants: Mapping[str, TenantPolicy] = field(
        default_factory=dict,
        metadata=option(
            "a mapping of tenant, or * for all others, to weight, requests_per_minute, tokens_per_minute, "
            "max_in_progress",
            tenants_from,
        ),
    )
    verifier_wait_s: float = field(default=10.0, metadata=option("longest wait while no verifier can serve at all"))
    max_replays: int = field(default=5, metadata=option("failures in a row without a new token that end a request"))
    stall_timeout_s: float = field(
        default=1.0,
        metadata=option("least silence of a verifier; if it does not answer then, its sequences run on another, too"),
    )
    max_hedges: int = field(default=8, metadata=option("sequences that run twice at once, at most; 0 is none"))
    token_credit: int = field(default=64, metadata=option("token frames a verifier may have in flight"))
    redis_timeout_s: float = field(
        default=0.1, metadata=option("longest time that a request waits for Redis before it goes on without")
    )
    session_ttl_s: float = field(default=1800.0, metadata=option("time a session's verifier is remembered"))
    prefix_ttl_s: float = field(
        default=600.0, metadata=option("time a verifier is believed to hold the KV of what it ran")
    )
    journal_ttl_s: float = field(
        default=60.0, metadata=option("time in which another router can take up a request whose router is gone")
    )
    journal_bytes: int = field(
        default=64 << 20, metadata=option("most bytes of this router's running requests in Redis; 0 keeps none")
    )
    tenant_header: str = field(
        default="",
        metadata=option(
            "header or gRPC metadata in which an authenticating gateway names the tenant; it must drop what clients "
            "send under that name. Requests without it leave nothing behind for others. Empty: all are one tenant's"
        ),
    )
    api_keys_file: Path | None = field(
        default=None,
        metadata=option(
            "YAML list of API keys (`treeserve keys new`), read again when it changes: then every call needs one but "
            "health, and the key says whose it is. Empty: anybody may call"
        ),
    )
    tls: TlsFiles | None = field(default=None, metadata=TLS_OPTION)
    require_client_certs: bool = field(
        default=False, metadata=option("under TLS, clients too must show a certificate of tls.ca_file")
    )
    explain_requests: int = field(
        default=0,
        metadata=option(
            "latest requests whose way `treeserve explain` can tell; 0 is off. Then whoever reaches the router can ask "
            "about requests of the own tenant, knowing their ids"
        ),
    )
    streams_per_router: int = field(
        default=200, metadata=option("requests in progress that one router is meant for; a hint for autoscalers")
    )
    drain_s: float = field(default=30.0, metadata=option("time to finish running streams after SIGTERM"))
    reflection: bool = field(default=True, metadata=option("serve gRPC reflection"))
    log_level: str = field(default="info", metadata=option("debug, info, warning or error"))
    otlp_endpoint: str | None = field(default=None, metadata=option("OpenTelemetry collector; empty is off"))

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_queued_requests", "max_queued_tokens", "max_queued_bytes")
        check_at_least(self, 1, "max_replays", "token_credit", "streams_per_router")
        check_at_least(self, 0, "max_hedges", "journal_bytes", "explain_requests")
        for name in ("stall_timeout_s", "redis_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidArgumentError(name, "must be a number of seconds above 0")
        for name in ("ageing_s", "verifier_wait_s", "drain_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidArgumentError(name, "must be a number of seconds, not negative")
        for name in ("session_ttl_s", "prefix_ttl_s", "journal_ttl_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 1):
                raise InvalidArgumentError(name, "must be a number of seconds, at least 1")
        if self.redis_url is not None and not self.redis_url.startswith(_REDIS_SCHEMES):
            raise InvalidArgumentError("redis_url", f"begins with none of {', '.join(_REDIS_SCHEMES)}")
        for name in ("tenant_header", "service_class_header"):
            if not _HEADER_NAME.fullmatch(getattr(self, name)):
                raise InvalidArgumentError(name, "is no lower-case header name")
        if self.queue_policy not in QUEUE_POLICIES:
            raise InvalidArgumentError("queue_policy", f"is none of {', '.join(QUEUE_POLICIES)}")
        class_named(self.default_service_class, "default_service_class")
        if self.api_keys_file is not None and self.trust_clients is not None:
            raise InvalidArgumentError("trust_clients", "leave it empty with api_keys_file: each key says it")
        if self.require_client_certs and self.tls is None:
            raise InvalidArgumentError("require_client_certs", "needs tls")
        if not self.model_name:
            raise InvalidArgumentError("model_name", "is empty")

    @property
    def dispatch_policies(self) -> Policies:
        """Policies that dispatch keeps to: in order of arrival none, so nothing is reserved or refused early."""
        return {} if self.queue_policy == "fifo" else self.qos

    @property
    def service_levels(self) -> ServiceLevels:
        """What requests are promised."""
        has_gateway = bool(self.tenant_header or self.service_class_header)
        return ServiceLevels(
            policies=self.qos,
            default_class=class_named(self.default_service_class, "default_service_class"),
            class_header=self.service_class_header,
            trust_clients=not has_gateway if self.trust_clients is None else self.trust_clients,
        )
