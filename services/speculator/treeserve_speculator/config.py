"""The speculator's configuration, fully resolved before anything is built."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.made_once import default_cache_dir
from treeserve_engine.precision import AUTO, check_dtype
from treeserve_wire.config import check_at_least, option
from treeserve_wire.tls import TLS_OPTION, TlsFiles

SSM = "ssm"
SSMS = (SSM, *(f"{SSM}{i}" for i in range(2, 6)))
CORPUS = "corpus"
NGRAM_TABLE = "ngram_table"
HEAD = "head"
TRAINED = "trained"  # in place of all that was trained for the target
CHEAP_SOURCES = ("ngram", "suffix", "recycling", NGRAM_TABLE)  # next to no computing time
MAX_SOURCE_BUDGET_MS = 10_000.0
MAX_SOURCES = 16


@dataclass(frozen=True)
class SpeculatorConfig:
    """One speculator process. Fields load from YAML, TREESERVE_* variables and flags (treeserve_wire.config).

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    model_folder: Path = field(metadata=option("folder of the target model; only its tokenizer and config are read"))
    model_name: str = field(metadata=option("served model name, the same as the verifiers'"))
    verifiers: tuple[str, ...] = field(
        default=("127.0.0.1:50052",),
        metadata=option(
            "verifier addresses: host:port, unix:/path, dns://name:port for all addresses behind a name, or "
            "kubernetes://namespace/service:port for the ready pods of a Service, watched through the Kubernetes API"
        ),
    )
    listen: str = field(
        default="127.0.0.1:50053", metadata=option("gRPC address of the health service, host:port or unix:/path")
    )
    health_listen: str = field(
        default="", metadata=option("plaintext address of the gRPC health service, for probes under TLS; empty is off")
    )
    metrics_listen: str = field(default="", metadata=option("Prometheus address, host:port; empty is off"))
    speculator_id: str = field(default_factory=socket.gethostname, metadata=option("name in logs and hellos"))
    sources: tuple[str, ...] = field(
        default=("ngram", "suffix", "recycling", TRAINED),
        metadata=option(
            "draft sources: ngram, suffix, recycling, ngram_table, ssm, head, corpus, an installed one, "
            "package.module:attribute, or trained: all drafters that were trained for the model"
        ),
    )
    max_nodes: int = field(default=64, metadata=option("most nodes of a tree, the root not counted"))
    max_depth: int = field(default=16, metadata=option("deepest node of a tree"))
    source_budget_ms: float = field(
        default=20.0, metadata=option("longest wait for the trees of a source that is not built in")
    )
    corpus: Path | None = field(
        default=None, metadata=option("file of `treeserve corpus build`; adds the corpus source")
    )
    drafter_folder: Path | None = field(
        default=None,
        metadata=option(
            "folder of drafters trained for the model: what ngram_table, head, ssm, ssm2 ... ssm5 draft with; "
            "without it those shipped for the model, if any"
        ),
    )
    ssm_folder: Path | None = field(default=None, metadata=option("folder of a small draft model; adds the ssm source"))
    ssm_dtype: str = field(
        default=AUTO,
        metadata=option("the draft model's weights: int8, bfloat16, float32; auto is int8 on CPUs where that exists"),
    )
    ssm_kv_tokens: int = field(default=16384, metadata=option("tokens the draft model's KV cache holds"))
    ssm_depth: int = field(default=6, metadata=option("levels the draft model grows a tree by"))
    ssm_width: int = field(default=6, metadata=option("nodes a draft model expands per level, and children of each"))
    threads: int = field(default=1, metadata=option("threads of the draft model"))
    cache_dir: Path = field(
        default_factory=default_cache_dir, metadata=option("where weights converted to int8 are kept")
    )
    tls: TlsFiles | None = field(default=None, metadata=TLS_OPTION)
    log_level: str = field(default="info", metadata=option("debug, info, warning or error"))
    otlp_endpoint: str | None = field(default=None, metadata=option("OpenTelemetry collector; empty is off"))

    def __post_init__(self) -> None:
        names = self.source_names
        if not 1 <= len(names) <= MAX_SOURCES or len(set(names)) != len(names):
            raise InvalidArgumentError("sources", f"name 1 to {MAX_SOURCES} sources, each once")
        if CORPUS in names and self.corpus is None:
            raise InvalidArgumentError("corpus", "the corpus source needs a file that `treeserve corpus build` made")
        if not 0 < self.source_budget_ms <= MAX_SOURCE_BUDGET_MS:
            raise InvalidArgumentError("source_budget_ms", f"is outside (0, {MAX_SOURCE_BUDGET_MS:g}]")
        if not self.verifiers:
            raise InvalidArgumentError("verifiers", "name at least one")
        check_dtype("ssm_dtype", self.ssm_dtype)
        check_at_least(self, 1, "max_nodes", "max_depth", "ssm_kv_tokens", "ssm_depth", "ssm_width", "threads")

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources to build, `trained` among them: a file or folder of one adds it."""
        named = ((SSM, self.ssm_folder), (CORPUS, self.corpus))
        added = tuple(name for name, path in named if path is not None and name not in self.sources)
        return (*self.sources, *added)
