"""A cluster for tests whose target drafts for itself: trees are asked for, waited for and verified at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treeserve_cli.layout import ClusterConfig


def self_drafting_config(model: Path, run_dir: Path, settings: tuple[str, ...] = (), **fields: Any) -> ClusterConfig:
    """A small cluster of `model` with itself as draft model."""
    given = {"sources": ("ssm",), "kv_tokens": 2048, "no_redis": True, "grpc_port": 0, "http_port": 0} | fields
    small = ("verifier.max_context_tokens=256", "speculator.ssm_kv_tokens=2048")
    eager = ("verifier.draft_always=true", "verifier.draft_wait_ms=500")
    return ClusterConfig(model=model, drafter=model, run_dir=run_dir, settings=(*small, *eager, *settings), **given)
