"""The verifier's configuration, fully resolved before anything is built."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError


@dataclass(frozen=True)
class VerifierConfig:
    """One verifier process. Fields load from YAML, TREESERVE_* variables and flags (treeserve_wire.config)."""

    model_folder: Path = field(metadata={"help": "Hugging Face folder of the target model"})
    model_name: str = field(metadata={"help": "name the model is served under"})
    listen: str = field(default="127.0.0.1:50052", metadata={"help": "gRPC address, host:port or unix:/path"})
    metrics_listen: str = field(default="", metadata={"help": "Prometheus address, host:port; empty is off"})
    verifier_id: str = field(default_factory=socket.gethostname, metadata={"help": "name in logs, leases and hellos"})
    dtype: str = field(default="float32", metadata={"help": "weights and KV: float32 or bfloat16"})
    device: str = field(default="cpu", metadata={"help": "torch device"})
    threads: int = field(default=2, metadata={"help": "CPU threads of the forward pass"})
    kv_tokens: int = field(default=16384, metadata={"help": "KV cache capacity in tokens"})
    block_size: int = field(default=16, metadata={"help": "tokens in a KV block"})
    max_sequences: int = field(default=32, metadata={"help": "sequences that run at once"})
    max_waiting: int = field(default=256, metadata={"help": "sequences that wait for KV blocks, beyond which: refused"})
    max_context_tokens: int = field(default=4096, metadata={"help": "longest prompt plus output in tokens"})
    max_nodes: int = field(default=32, metadata={"help": "draft nodes of one tree, the root not counted"})
    max_depth: int = field(default=16, metadata={"help": "deepest draft node"})
    step_rows: int = field(default=256, metadata={"help": "most rows of one forward pass"})
    prefill_rows: int = field(default=64, metadata={"help": "most prefill rows of a step that also decodes"})
    draft_wait_ms: float = field(default=15.0, metadata={"help": "longest wait for a tree before decoding plainly"})
    drain_s: float = field(default=30.0, metadata={"help": "time to finish running sequences after SIGTERM"})
    reflection: bool = field(default=True, metadata={"help": "serve gRPC reflection"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    otlp_endpoint: str | None = field(default=None, metadata={"help": "OpenTelemetry collector; empty is off"})

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise InvalidArgumentError("dtype", f"{self.dtype!r} is not float32 or bfloat16")
        for name in ("threads", "kv_tokens", "block_size", "max_sequences", "max_context_tokens", "step_rows"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(name, "must be at least 1")
        if self.max_nodes < 0 or self.max_depth < 1 or self.max_waiting < 0:
            raise InvalidArgumentError("max_nodes", "max_nodes, max_depth and max_waiting cannot be negative")
        if self.step_rows <= self.max_sequences:
            raise InvalidArgumentError("step_rows", "must exceed max_sequences: every sequence needs its root row")
        if not 1 <= self.prefill_rows <= self.step_rows:
            raise InvalidArgumentError("prefill_rows", f"is outside [1, step_rows = {self.step_rows}]")
        if self.kv_tokens // self.block_size * self.block_size < self.max_context_tokens + self.block_size:
            raise InvalidArgumentError("kv_tokens", "must hold one sequence of max_context_tokens and one more block")
