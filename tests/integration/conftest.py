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
    os.environ["PYTHONPATH"] = str(TESTS)
    os.environ[TRUTH_VARIABLE] = str(truth_file)
    config = ClusterConfig(
        model=model_folder,
        model_name="SmolLM2-135M-Instruct",
        cache_dir=cache_dir,
        run_dir=tmp_path_factory.mktemp("run"),
        dtype="float32",
        sources=("ngram", "suffix", "recycling", "support.shaped_drafts:build"),
        grpc_port=0,
        http_port=0,
    )
    with LocalCluster(config) as running:
        yield running
