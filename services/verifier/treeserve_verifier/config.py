"""The verifier's configuration, fully resolved before anything is built."""

from __future__ import annotations

import math
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.made_once import default_cache_dir
from treeserve_engine.precision import AUTO, check_dtype
from treeserve_wire.config import check_at_least, option
from treeserve_wire.tls import TLS_OPTION, TlsFiles


def default_threads() -> int:
    """Half the cores, because event loops, drafters and the router need theirs; two where there are only two or three.

    Then the second thread shares its core with all of them, and still brings more than it waits.
    """
    cores = os.cpu_count() or 1
    return min(cores, max(2, cores // 2))


@dataclass(frozen=True)
class VerifierConfig:
    """One verifier process. Fields load from YAML, TREESERVE_* variables and flags (treeserve_wire.config).

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    model_folder: Path = field(metadata=option("Hugging Face folder of the target model"))
    model_name: str = field(metadata=option("name the model is served under"))
    listen: str = field(default="127.0.0.1:50052", metadata=option("gRPC address, host:port or unix:/path"))
    health_listen: str = field(
        default="", metadata=option("plaintext address of the gRPC health service, for probes under TLS; empty is off")
    )
    metrics_listen: str = field(default="", metadata=option("Prometheus address, host:port; empty is off"))
    verifier_id: str = field(default_factory=socket.gethostname, metadata=option("name in logs, leases and hellos"))
    dtype: str = field(
        default=AUTO,
        metadata=option("weights: int8, bfloat16, float32; auto is int8 on CPUs where that exists, bfloat16 on GPUs"),
    )
    kv_dtype: str = field(
        default=AUTO, metadata=option("KV cache: int8, bfloat16, float32; auto is bfloat16 beside int8, else dtype")
    )
    cache_dir: Path = field(
        default_factory=default_cache_dir, metadata=option("where weights converted to int8 are kept")
    )
    device: str = field(default="cpu", metadata=option("torch device"))
    threads: int = field(
        default_factory=default_threads,
        metadata=option("CPU threads of the forward pass; by default half the cores, but two"),
    )
    kv_tokens: int = field(default=16384, metadata=option("KV cache capacity in tokens"))
    block_size: int = field(default=16, metadata=option("tokens in a KV block"))
    kv_host_mb: int = field(
        default=256, metadata=option("host memory for KV that was evicted and may be wanted again, MB; 0 is off")
    )
    kv_disk_mb: int = field(default=0, metadata=option("disk for what host memory has no room for, MB; 0 is off"))
    kv_disk_folder: Path = field(
        default_factory=lambda: Path(tempfile.gettempdir()), metadata=option("where that file lies, without a name")
    )
    session_lease_s: float = field(
        default=60.0, metadata=option("how long the KV of a session is kept before that of others after a turn")
    )
    max_sequences: int = field(default=32, metadata=option("sequences that run at once"))
    reserved_sequences: int = field(default=1, metadata=option("places beyond those, for realtime sequences alone"))
    max_waiting: int = field(default=256, metadata=option("sequences that wait for KV blocks, beyond which: refused"))
    max_context_tokens: int = field(default=4096, metadata=option("longest prompt plus output in tokens"))
    max_nodes: int = field(default=32, metadata=option("draft nodes of one tree, the root not counted"))
    max_depth: int = field(default=16, metadata=option("deepest draft node"))
    step_rows: int = field(default=256, metadata=option("most rows of one forward pass"))
    prefill_rows: int = field(default=128, metadata=option("most prefill rows of a step that also decodes"))
    max_decode_gap_ms: float = field(
        default=100.0, metadata=option("longest step beside which prefill rows may keep decoding sequences waiting")
    )
    ageing_s: float = field(default=10.0, metadata=option("waiting that makes a sequence more urgent by one class"))
    draft_wait_ms: float = field(default=15.0, metadata=option("longest wait for a tree before decoding plainly"))
    emit_interval_ms: float = field(
        default=40.0, metadata=option("least time between two frames of tokens to a router; first tokens go at once")
    )
    colocated_sources: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "draft sources that also run in this process: for models whose steps take only milliseconds, where a "
            "tree's way from a speculator costs what it saves. Those that take next to no computing time: ngram, "
            "suffix, recycling, ngram_table; trained stands for the last where it was trained"
        ),
    )
    colocated_drafter: str = field(
        default="treeserve_speculator.colocated:build",
        metadata=option("package.module:factory of the drafter for colocated_sources"),
    )
    drafter_folder: Path | None = field(
        default=None,
        metadata=option("trained drafters for colocated_sources; without it those shipped for the model, if any"),
    )
    draft_always: bool = field(
        default=False,
        metadata=option("wait for and verify all that is drafted, whether or not it is expected to pay: for tests"),
    )
    drain_s: float = field(default=30.0, metadata=option("time to finish running sequences after SIGTERM"))
    tls: TlsFiles | None = field(default=None, metadata=TLS_OPTION)
    reflection: bool = field(default=True, metadata=option("serve gRPC reflection"))
    log_level: str = field(default="info", metadata=option("debug, info, warning or error"))
    otlp_endpoint: str | None = field(default=None, metadata=option("OpenTelemetry collector; empty is off"))

    @property
    def places(self) -> int:
        """Sequences that run at once, on reserved places too."""
        return self.max_sequences + self.reserved_sequences

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        check_dtype("kv_dtype", self.kv_dtype)
        check_at_least(
            self, 1, "threads", "kv_tokens", "block_size", "max_sequences", "max_context_tokens", "step_rows"
        )
        check_at_least(self, 1, "max_depth")
        check_at_least(self, 0, "max_nodes", "max_waiting", "kv_host_mb", "kv_disk_mb", "reserved_sequences")
        if self.step_rows <= self.places:
            raise InvalidArgumentError("step_rows", "must exceed all places: every sequence needs its root row")
        for name in ("max_decode_gap_ms", "ageing_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(name, "must be positive")
        for name in ("session_lease_s", "draft_wait_ms", "emit_interval_ms", "drain_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidArgumentError(name, "must be a number, not negative")
        if not 1 <= self.prefill_rows <= self.step_rows:
            raise InvalidArgumentError("prefill_rows", f"is outside [1, step_rows = {self.step_rows}]")
        least = (-(-self.max_context_tokens // self.block_size) + 1) * self.block_size
        if self.kv_tokens < least:
            raise InvalidArgumentError(
                "kv_tokens",
                f"{self.kv_tokens} are too few: a sequence of max_context_tokens = {self.max_context_tokens} and one "
                f"more block need {least}",
            )
