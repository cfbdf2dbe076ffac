"""One local cluster on the real model for all integration tests: the three services and a Valkey, as processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shaped_drafts import TRUTH_VARIABLE

from treeserve_cli.cluster import LocalCluster
from treeserve_cli.layout import ClusterConfig

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def truth_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test tells the shaped draft source what the target will say."""
    return tmp_path_factory.mktemp("truth") / "truth.json"


@pytest.fixture(scope="session")
def cluster(
    cache_dir: Path, model_folder: Path, truth_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """The default model in float32, with every built-in draft source and one that disguises the truth."""
    with _running("float32", cache_dir, model_folder, truth_file, tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="session")
def int8_cluster(
    cache_dir: Path, model_folder: Path, truth_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """The same in int8."""
    with _running("int8", cache_dir, model_folder, truth_file, tmp_path_factory) as running:
        yield running


def _running(
    dtype: str, cache_dir: Path, model_folder: Path, truth_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> LocalCluster:
    os.environ["PYTHONPATH"] = str(TESTS)
    os.environ[TRUTH_VARIABLE] = str(truth_file)
    config = ClusterConfig(
        model=model_folder,
        model_name="SmolLM2-135M-Instruct",
        cache_dir=cache_dir,
        run_dir=tmp_path_factory.mktemp("run"),
        dtype=dtype,
        sources=("ngram", "suffix", "recycling", "support.shaped_drafts:build"),
        # Whatever the machine's speed, trees are waited for and verified.
        settings=("verifier.draft_always=true", "speculator.source_budget_ms=2000"),
        grpc_port=0,
        http_port=0,
    )
    return LocalCluster(config)
