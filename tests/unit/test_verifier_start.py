"""Models and settings with which a verifier could not serve end its start with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.sequences import make_config

from treeserve_core.errors import InvalidArgumentError
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.main import load_engine


def start(folder: Path, **changes: Any) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "max_context_tokens": 64, "kv_tokens": 128}
    load_engine(VerifierConfig(model_folder=folder, model_name="tiny", **settings | changes)).thread.shutdown()


def test_a_cache_for_less_than_one_sequence_is_refused_with_what_it_needs() -> None:
    sizes = {"max_context_tokens": 100, "block_size": 16}
    VerifierConfig(Path("m"), "m", kv_tokens=128, **sizes)
    with pytest.raises(InvalidArgumentError, match=r"127 are too few: .* max_context_tokens = 100 .* need 128"):
        VerifierConfig(Path("m"), "m", kv_tokens=127, **sizes)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_model_whose_logits_are_no_numbers_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match="not finite"):
        start(folder)


def test_a_context_window_too_short_to_measure_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    for positions, is_served in ((63, False), (64, True)):
        (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": positions}))
        if is_served:
            start(folder)
        else:
            with pytest.raises(InvalidArgumentError, match="model: has room for 63 tokens"):
                start(folder)


def test_a_cache_too_small_to_measure_is_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="kv_tokens: has room for 48 tokens"):
        start(tiny_model, max_context_tokens=16, kv_tokens=48)


@pytest.mark.parametrize("name", ["draft_wait_ms", "emit_interval_ms", "session_lease_s", "drain_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_are_numbers_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        make_config(**{name: value})
