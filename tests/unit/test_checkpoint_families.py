"""Checkpoints of other families: folders and GGUF files that go through transformers, and vocabularies it converts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from support.gguf_files import add_vocabulary
from support.tiny_families import VOCAB, tiny_reference, write_tiny_family
from support.tokenizer_folders import byte_level_bpe, write_folder

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_text.tokenizer import Tokenizer

BACKEND = byte_level_bpe()
TOKENS = BACKEND.get_vocab_size()
GPT2_NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def _silent(_: str) -> None:
    pass


# --- GGUF ---


def write_gpt2_gguf(path: Path, weights: Mapping[str, torch.Tensor], *, arch: str = "gpt2", pre: str = "gpt-2") -> Path:
    """A GPT-2 as llama.cpp's converter lays it out: matrices of Conv1D layers the other way round."""
    writer = GGUFWriter(path, arch)
    numbers = {"context_length": 1024, "embedding_length": 64, "block_count": 2, "attention.head_count": 4}
    for name, value in numbers.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    add_vocabulary(writer, BACKEND, 0)
    for name, tensor in weights.items():
        turned = tensor.ndim == 2 and ".h." in name
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray((tensor.T if turned else tensor).numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    base, _, kind = name.removeprefix("transformer.").rpartition(".")
    if base.startswith("h."):
        _, layer, base = base.split(".", 2)
        return f"blk.{layer}.{GPT2_NAMES[base]}.{kind}"
    return f"{GPT2_NAMES[base]}.{kind}"


def gpt2_weights() -> dict[str, torch.Tensor]:
    model = tiny_reference("gpt2", vocab_size=TOKENS, n_inner=None, max_position_embeddings=1024)
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def test_a_gguf_of_another_family_becomes_the_same_weights(tmp_path: Path) -> None:
    weights = gpt2_weights()
    source = write_gpt2_gguf(tmp_path / "tiny.gguf", weights)
    folder = prepare_checkpoint(source, tmp_path / "cache", _silent)
    converted = load_file(folder / "model.safetensors")
    assert {name for name in weights if not torch.equal(converted[name], weights[name])} == set()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("the lazy dog") == BACKEND.encode("the lazy dog").ids
    assert tokenizer.eos_token_ids == (1,)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["n_positions"]) == ("gpt2", 1024)
    told: list[str] = []
    assert prepare_checkpoint(source, tmp_path / "cache", told.append) == folder
    assert told == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"arch": "rwkv7"}, "'rwkv7' is not supported"), ({"arch": "mamba"}, "recurrent"), ({"pre": "odd"}, "'odd'")],
)
def test_a_gguf_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    source = write_gpt2_gguf(tmp_path / "tiny.gguf", gpt2_weights(), **options)
    with pytest.raises(InvalidArgumentError, match=reason):
        prepare_checkpoint(source, tmp_path / "cache", _silent)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and not path.name.startswith(".")]


# --- folders ---


def test_a_folder_of_another_family_is_returned_as_it_is(tmp_path: Path) -> None:
    write_tiny_family(tmp_path / "model", "opt")
    write_folder(BACKEND, tmp_path / "model")
    assert prepare_checkpoint(tmp_path / "model", tmp_path / "cache", _silent) == tmp_path / "model"


def test_a_folder_that_cannot_work_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_tiny_family(tmp_path / "model", "mamba", state_size=8)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match="recurrent"):
        prepare_checkpoint(tmp_path / "model", tmp_path / "cache", _silent)


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text("raise SystemExit('code that came with a checkpoint ran')")
    with pytest.raises(InvalidArgumentError, match="transformers cannot read its configuration"):
        prepare_checkpoint(tmp_path, tmp_path / "cache", _silent)


# --- vocabularies ---


def _write_gpt2_vocabulary(folder: Path) -> None:
    spec = json.loads(BACKEND.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
    merges = [" ".join(pair) for pair in spec["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def test_a_vocabulary_is_converted_once_beside_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_family(folder, "gpt2", vocab_size=TOKENS)
    _write_gpt2_vocabulary(folder)
    made = prepare_checkpoint(folder, tmp_path / "cache", _silent)
    assert made.parent == tmp_path / "cache"
    assert not (folder / "tokenizer.json").exists()
    assert Tokenizer.from_folder(made).encode("the lazy dog") == BACKEND.encode("the lazy dog").ids
    assert (made / "model.safetensors").resolve() == folder / "model.safetensors"
    assert prepare_checkpoint(folder, tmp_path / "cache", _silent) == made
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert prepare_checkpoint(folder, tmp_path / "cache", _silent) != made


def test_a_folder_without_any_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tiny_family(tmp_path / "model", "gpt2", vocab_size=VOCAB)
    with pytest.raises(InvalidArgumentError, match=r"holds no tokenizer\.json"):
        prepare_checkpoint(tmp_path / "model", tmp_path / "cache", _silent)
