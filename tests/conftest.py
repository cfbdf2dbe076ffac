"""Fixtures that several suites share: the real model, converted once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where the default model lies and converted models go; `make setup` fills it."""
    return Path(os.environ.get("TREESERVE_CACHE", REPOSITORY / ".cache"))


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Models that tests make are converted into a folder of this run, by the services they start too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("user-cache"))


@pytest.fixture(scope="session")
def model_folder(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    from treeserve_engine.checkpoint import prepare_checkpoint

    source = cache_dir / "SmolLM2-135M-Instruct.gguf"
    assert source.exists(), "run `make setup` first: it fetches the default model"
    return prepare_checkpoint(source, cache_dir, lambda message: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer, as a Hugging Face folder."""
    from support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", vocab_padding=6)
