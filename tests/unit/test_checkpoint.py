"""Model folders: what is accepted, what is refused and why, and how their weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.model_configs import write_config
from support.tokenizer_folders import byte_level_bpe, write_folder

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_engine.weights import load_tensors

BACKEND = byte_level_bpe()


def _silent(_: str) -> None:
    pass


def test_a_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = write_folder(BACKEND, write_config(tmp_path / "model"))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    assert prepare_checkpoint(folder, tmp_path / "cache", _silent) == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_with_what_it_lacks(tmp_path: Path, missing: str) -> None:
    folder = write_folder(BACKEND, write_config(tmp_path / "model"))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    (folder / missing).unlink()
    with pytest.raises(InvalidArgumentError, match=missing):
        prepare_checkpoint(folder, tmp_path / "cache", _silent)


@pytest.mark.parametrize(("name", "reason"), [("absent.gguf", "does not exist"), ("model.bin", "neither")])
def test_other_sources_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(InvalidArgumentError, match=reason):
        prepare_checkpoint(tmp_path / name, tmp_path / "cache", _silent)


def test_sharded_weights_are_one_mapping(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, tmp_path / "x-1.safetensors")
    save_file({"c": torch.tensor([3.0], dtype=torch.bfloat16)}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_tensors(tmp_path)
    assert {name: value.item() for name, value in tensors.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert tensors["c"].dtype == torch.bfloat16
    assert "d" not in tensors
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match="x-2"):
        load_tensors(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match="is broken"):
        load_tensors(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidArgumentError, match="damaged"):
        load_tensors(tmp_path)
