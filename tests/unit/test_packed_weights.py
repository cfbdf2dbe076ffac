"""The int8 file: converted once, mapped afterwards, and never trusted when it is not what was written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_model import write_tiny_model

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine import packed_weights as module
from treeserve_engine.array_file import FOOTER_BYTES, DamagedFileError, map_arrays, write_arrays
from treeserve_engine.config import load_config
from treeserve_engine.huge_pages import huge_buffer
from treeserve_engine.made_once import _sha256
from treeserve_engine.packed_weights import convert, packed_file, packed_weights
from treeserve_engine.rope import RopeTable
from treeserve_engine.weights import load_tensors
from treeserve_kernels.cpu.packing import unpack_linear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def silent(_line: str) -> None:
    pass


def no_subprocess(*_: Any) -> None:
    raise AssertionError("the file was there")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("packed") / "some-model")


@pytest.fixture(scope="module")
def filled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    convert(folder, cache, silent)
    return cache


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(filled, tmp_path / "cache")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions, which run here instead of in a process of their own."""
    conversions: list[Path] = []

    def run(folder: Path, cache_dir: Path, progress: Callable[[str], None]) -> None:
        conversions.append(convert(folder, cache_dir, progress))

    monkeypatch.setattr(module, "_convert_in_subprocess", run)
    return conversions


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_the_checkpoint(tmp_path: Path, name: str, in_process: list[Path]) -> None:
    folder = write_tiny_model(tmp_path / "model", name=name)
    weights, tensors, config = packed_weights(folder, tmp_path, silent), load_tensors(folder), load_config(folder)
    assert len(in_process) == 1 and len(weights.layers) == 2
    prefix = "model.layers.1"
    joined = {
        "qkv": [f"{prefix}.self_attn.{letter}_proj" for letter in "qkv"],
        "attention_output": [f"{prefix}.self_attn.o_proj"],
        "gate_up": [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
        "down": [f"{prefix}.mlp.down_proj"],
    }
    for part, names in joined.items():
        packed = getattr(weights.layers[1], part)
        quantised, scales = unpack_linear(packed)
        expected = torch.cat([tensors[f"{n}.weight"] for n in names]).numpy()
        assert (np.abs(quantised * scales[:, None] - expected) <= 0.501 * scales[:, None]).all(), part
        assert packed.interleaved == (part == "gate_up")
    has_bias = [getattr(weights.layers[1], part).bias is not None for part in joined]
    assert has_bias == [name == "qwen2", False, False, False]
    if name == "qwen2":
        bias = torch.cat([tensors[f"{n}.bias"] for n in joined["qkv"]]).numpy()
        np.testing.assert_array_equal(weights.layers[1].qkv.bias[: len(bias)], bias)
    np.testing.assert_array_equal(weights.embedding, tensors["model.embed_tokens.weight"].numpy())
    np.testing.assert_array_equal(weights.norm, tensors["model.norm.weight"].numpy())
    q_norm = weights.layers[1].q_norm
    if name == "qwen3":
        np.testing.assert_array_equal(q_norm, tensors[f"{prefix}.self_attn.q_norm.weight"].numpy())
    else:
        assert q_norm is None
    np.testing.assert_array_equal(weights.rope_sin, RopeTable.of(config).sin)


def test_arrays_are_aligned_shared_and_read_only(folder: Path, cache: Path) -> None:
    weights = packed_weights(folder, cache, silent)
    arrays = [weights.embedding, weights.rope_cos, weights.layers[1].qkv.panels, weights.layers[1].qkv.scales]
    for array in arrays:
        assert array.ctypes.data % 64 == 0 and not array.flags.writeable and not array.flags.owndata


def test_the_second_time_nothing_is_converted(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert_in_subprocess", no_subprocess)
    lines: list[str] = []
    packed_weights(folder, cache, lines.append)
    assert lines == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def flip_a_bit_of_the_index(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def flip_a_bit_of_the_indexs_length(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-FOOTER_BYTES] ^= 1
    path.write_bytes(content)


def lengthen_the_index_beyond_the_file(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-FOOTER_BYTES + 7] ^= 64
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def become_another_file(path: Path) -> None:
    path.write_bytes(bytes(10_000))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        halve,
        flip_a_bit,
        flip_a_bit_of_the_index,
        flip_a_bit_of_the_indexs_length,
        lengthen_the_index_beyond_the_file,
        empty,
        become_another_file,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_made_anew(folder: Path, cache: Path, in_process: list[Path], damage: Any) -> None:
    target = packed_file(folder, cache)
    whole = target.read_bytes()
    packed_weights(folder, cache, silent)  # what it learnt of the whole file must not count for the damaged one
    damage(target)
    lines: list[str] = []
    packed_weights(folder, cache, lines.append)
    assert len(in_process) == 1 and target.read_bytes() == whole
    assert str(target) in lines[0] and "anew" in lines[0]


@pytest.mark.parametrize("changes", [{"seed": 5}, {"num_layers": 1}], ids=str)
def test_another_models_file_under_its_name_is_not_taken(
    folder: Path, cache: Path, tmp_path: Path, in_process: list[Path], changes: dict[str, int]
) -> None:
    target = packed_file(folder, cache)
    whole = target.read_bytes()
    other = convert(write_tiny_model(tmp_path / "other", **changes), tmp_path, silent)
    shutil.copy(other, target)
    lines: list[str] = []
    packed_weights(folder, cache, lines.append)
    assert len(in_process) == 1 and target.read_bytes() == whole
    assert "another model" in lines[0]


def test_another_version_is_another_file(
    folder: Path, cache: Path, in_process: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = packed_file(folder, cache)
    monkeypatch.setattr(module, "_FORMAT_VERSION", module._FORMAT_VERSION + 1)
    packed_weights(folder, cache, silent)
    assert in_process == [packed_file(folder, cache)] and in_process[0] != before


@pytest.mark.parametrize("what", ["weights", "config"])
def test_the_name_follows_the_content(folder: Path, tmp_path: Path, what: str) -> None:
    changed = shutil.copytree(folder, tmp_path / folder.name)
    assert packed_file(changed, tmp_path) == packed_file(folder, tmp_path)
    if what == "weights":
        content = bytearray((changed / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (changed / "model.safetensors").write_bytes(content)
    else:
        config = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert packed_file(changed, tmp_path) != packed_file(folder, tmp_path)


def test_weights_that_are_no_numbers_are_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidArgumentError, match="finite"):  # in the other process
        packed_weights(broken, tmp_path / "cache", silent)
    assert not list((tmp_path / "cache").glob("*.int8")) and not list((tmp_path / "cache").glob(".*.unfinished"))


def test_the_command_converts_ahead_of_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "treeserve_engine.packed_weights", str(folder), "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "converting the weights" in done.stdout
    monkeypatch.setattr(module, "_convert_in_subprocess", no_subprocess)
    assert len(packed_weights(folder, tmp_path, silent).layers) == 2


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors[name].view(-1)[5] = float("inf")
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match="not finite"):
        convert(damaged, tmp_path / "cache", silent)


def test_an_array_file_gives_back_what_was_written(tmp_path: Path) -> None:
    items: dict[str, Any] = {
        "odd": np.arange(7, dtype=np.uint8),
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "none": None,
        "number": 7,
    }
    write_arrays(tmp_path / "file", items.items())
    mapped = map_arrays(tmp_path / "file", lambda path: _sha256(path, module.FOOTER_BYTES))
    assert list(mapped) == list(items)
    for name, item in items.items():
        np.testing.assert_array_equal(mapped[name], item)
    assert mapped["matrix"].ctypes.data % 64 == 0
    with pytest.raises(DamagedFileError, match="changed"):
        map_arrays(tmp_path / "file", lambda _path: "0" * 64)


def test_hot_arrays_lie_in_memory_of_their_own_that_begins_at_a_huge_page(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    items: dict[str, Any] = {
        "a.panels": rng.integers(0, 256, (3, 5, 7), dtype=np.uint8),
        "a.scales": rng.standard_normal(9).astype(np.float32),
        "b.panels": rng.standard_normal((11, 13)),
        "none.panels": None,
        "c.panels": np.zeros((0, 4), np.uint8),
    }
    path = tmp_path / "file"
    write_arrays(path, items.items())
    found = map_arrays(path, lambda file: _sha256(file, module.FOOTER_BYTES), lambda name: name.endswith(".panels"))
    assert list(found) == list(items)
    path.write_bytes(bytes(path.stat().st_size))  # what is mapped follows the file
    assert not found["a.scales"].any()
    for name in ("a.panels", "b.panels", "c.panels", "none.panels"):
        np.testing.assert_array_equal(found[name], items[name])
    assert found["a.panels"].ctypes.data % (2 << 20) == 0
    assert found["b.panels"].ctypes.data % 64 == 0
    assert not found["a.panels"].flags.writeable


@pytest.mark.parametrize("num_bytes", [0, 1, 2 << 20, (2 << 20) + 1])
def test_a_huge_buffer_is_as_long_as_asked_for_and_zero(num_bytes: int) -> None:
    buffer = huge_buffer(num_bytes)
    assert buffer.shape == (num_bytes,) and not buffer.any()
    buffer[:] = 1


def test_without_huge_pages_the_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    assert huge_buffer(100).shape == (100,)


def test_every_part_of_a_layer_is_a_field_of_it() -> None:
    assert set(module._LINEARS) < {field.name for field in fields(module.LayerWeights)}
