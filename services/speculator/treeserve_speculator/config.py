"""What a speculator process is told: its verifiers, its draft sources and their bounds."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

SSM = "ssm"
MAX_SOURCES = 16


def _option(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class SpeculatorConfig:
    """Resolved configuration of one speculator.

    Raises:
        ValueError: for a value that cannot work.
    """

    model_folder: Path = field(metadata=_option("folder of the target model; only its tokenizer and config are read"))
    model_name: str = field(metadata=_option("served model name, the same as the verifier's"))
    verifiers: tuple[str, ...] = field(
        default=("127.0.0.1:50052",), metadata=_option("verifier addresses: host:port, unix:/path, or dns://name:port")
    )
    listen: str = field(default="127.0.0.1:50053", metadata=_option("address of the health service"))
    metrics_listen: str = field(default="", metadata=_option("address of Prometheus metrics; empty switches them off"))
    speculator_id: str = field(default_factory=socket.gethostname, metadata=_option("name in logs and metrics"))
    sources: tuple[str, ...] = field(
        default=("ngram", "suffix", "recycling"),
        metadata=_option("draft sources: ngram, suffix, recycling, ssm or package.module:factory"),
    )
    max_nodes: int = field(default=64, metadata=_option("most nodes of a tree, the root not counted"))
    max_depth: int = field(default=16, metadata=_option("deepest node of a tree"))
    ssm_folder: Path | None = field(
        default=None, metadata=_option("folder of a small draft model; adds the ssm source")
    )
    ssm_dtype: str = field(default="float32", metadata=_option("element type of the draft model: float32 or bfloat16"))
    ssm_kv_tokens: int = field(default=16384, metadata=_option("tokens the draft model's KV cache holds"))
    ssm_depth: int = field(default=6, metadata=_option("levels the draft model grows a tree by"))
    threads: int = field(default=1, metadata=_option("threads of the draft model"))
    log_level: str = field(default="info", metadata=_option("debug, info, warning or error"))
    otlp_endpoint: str | None = field(default=None, metadata=_option("OTLP endpoint for traces; none by default"))

    def __post_init__(self) -> None:
        names = self.source_names
        if not 1 <= len(names) <= MAX_SOURCES or len(set(names)) != len(names):
            raise ValueError(f"sources: name 1 to {MAX_SOURCES} sources, each once")
        if SSM in names and self.ssm_folder is None:
            raise ValueError("ssm_folder: the ssm source needs the folder of a draft model")
        if not self.verifiers:
            raise ValueError("verifiers: name at least one")
        if self.ssm_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"ssm_dtype: {self.ssm_dtype!r} is neither float32 nor bfloat16")
        for name in ("max_nodes", "max_depth", "ssm_kv_tokens", "ssm_depth", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sources to build, in the order of their bits in a node's source mask: a draft model's folder adds its own."""
        return self.sources if self.ssm_folder is None or SSM in self.sources else (*self.sources, SSM)
