"""GGUF files: converted once without losing anything, or refused with the reason."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from support.gguf_files import random_tensors, write_gguf
from support.tokenizer_folders import ADDED, byte_level_bpe
from tokenizers import Tokenizer as Backend

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_engine.config import LinearRopeScaling, load_config
from treeserve_engine.gguf_file import GgufFile
from treeserve_engine.gguf_tokenizer import write_tokenizer
from treeserve_engine.weights import load_tensors

BACKEND = byte_level_bpe()
ROWS = BACKEND.get_vocab_size()


def _silent(_: str) -> None:
    pass


def _convert(tmp_path: Path, **options: Any) -> Path:
    tensors = options.pop("tensors", None) or random_tensors(ROWS + options.get("unused_tokens", 0))
    source = write_gguf(tmp_path / "tiny.gguf", BACKEND, tensors, **options)
    return prepare_checkpoint(source, tmp_path / "cache", _silent)


def test_llama_weights_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    tensors = random_tensors(ROWS)
    converted = load_tensors(_convert(tmp_path, tensors=tensors))
    expected = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}"
        expected |= {
            f"{prefix}.input_layernorm.weight": f"blk.{layer}.attn_norm.weight",
            f"{prefix}.post_attention_layernorm.weight": f"blk.{layer}.ffn_norm.weight",
            f"{prefix}.self_attn.q_proj.weight": f"blk.{layer}.attn_q.weight",
            f"{prefix}.self_attn.k_proj.weight": f"blk.{layer}.attn_k.weight",
            f"{prefix}.self_attn.v_proj.weight": f"blk.{layer}.attn_v.weight",
            f"{prefix}.self_attn.o_proj.weight": f"blk.{layer}.attn_output.weight",
            f"{prefix}.mlp.gate_proj.weight": f"blk.{layer}.ffn_gate.weight",
            f"{prefix}.mlp.up_proj.weight": f"blk.{layer}.ffn_up.weight",
            f"{prefix}.mlp.down_proj.weight": f"blk.{layer}.ffn_down.weight",
        }
    assert set(converted) == set(expected)
    for name, gguf_name in expected.items():
        assert torch.equal(converted[name], torch.from_numpy(tensors[gguf_name])), name


def test_qwen2_keeps_its_row_order_and_biases(tmp_path: Path) -> None:
    tensors = random_tensors(ROWS, qkv_bias=True)
    folder = _convert(tmp_path, tensors=tensors, arch="qwen2", pre="qwen2")
    converted = load_tensors(folder)
    for letter in "qkv":
        for kind in ("weight", "bias"):
            value = converted[f"model.layers.1.self_attn.{letter}_proj.{kind}"]
            assert torch.equal(value, torch.from_numpy(tensors[f"blk.1.attn_{letter}.{kind}"]))
    config = load_config(folder)
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_quantised_weights_keep_their_exact_values(tmp_path: Path) -> None:
    tensors = random_tensors(ROWS)
    converted = load_tensors(_convert(tmp_path, tensors=tensors, quantization=GGMLQuantizationType.Q8_0))
    kind = GGMLQuantizationType.Q8_0
    name = "blk.0.ffn_up.weight"
    expected = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
    got = converted["model.layers.0.mlp.up_proj.weight"]
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), expected)
    assert not np.array_equal(expected, tensors[name])


def test_config_of_a_converted_file(tmp_path: Path) -> None:
    folder = _convert(tmp_path, tokenizer__ggml__eot_token_id=7, llama__rope__scaling__type="linear",
                      llama__rope__scaling__factor=4.0)  # fmt: skip
    config = load_config(folder)
    assert (config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads) == (ROWS, 2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (16, 256)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 100000.0), "shortest decimals, not float32 tails"
    assert config.rope_scaling == LinearRopeScaling(4.0)
    assert config.tie_word_embeddings
    assert (config.qkv_bias, config.output_bias) == (False, False)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 7]}


def test_an_output_layer_of_its_own_is_kept(tmp_path: Path) -> None:
    tensors = random_tensors(ROWS)
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    folder = _convert(tmp_path, tensors=tensors)
    assert not load_config(folder).tie_word_embeddings
    assert torch.equal(load_tensors(folder)["lm_head.weight"], torch.from_numpy(tensors["output.weight"]))


@pytest.mark.parametrize("text", ["the quick  fox", "naïve 東京 🙂\n\n x", f"<|im_end|>{ADDED} end", "a  1 22", ""])
def test_converted_tokenizer_encodes_as_the_original(tmp_path: Path, text: str) -> None:
    converted = Backend.from_file(str(_convert(tmp_path) / "tokenizer.json"))
    assert converted.encode(text).ids == BACKEND.encode(text).ids
    assert converted.decode(converted.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ", "Ġ1234", "ĊĊ", "Ġx"]),
        ("smollm", ["It", "'s", "ĠĠ", "1", "2", "3", "4", "ĊĊ", "Ġx"]),
        ("llama-bpe", ["It", "'s", "Ġ", "Ġ", "123", "4", "ĊĊ", "Ġx"]),
        ("qwen2", ["It", "'s", "Ġ", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġx"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    converted = Backend.from_file(str(_convert(tmp_path, pre=pre) / "tokenizer.json"))
    assert converted.pre_tokenizer is not None
    assert [piece for piece, _ in converted.pre_tokenizer.pre_tokenize_str("It's  1234\n\n x")] == pieces


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", BACKEND, random_tensors(ROWS))
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_tokenizer(GgufFile(source), tmp_path)


def test_bos_padding_tokens_and_template_of_a_converted_tokenizer(tmp_path: Path) -> None:
    folder = _convert(tmp_path, unused_tokens=6, tokenizer__ggml__add_bos_token=True)
    converted = Backend.from_file(str(folder / "tokenizer.json"))
    assert converted.encode("a").ids[0] == 0
    assert converted.get_vocab_size() == ROWS, "unused tokens are padding, not vocabulary"
    assert load_config(folder).vocab_size == ROWS + 6
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert settings["chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"arch": "gptneox"}, "'gptneox' is not supported"),
        ({"llama__block_count": None}, r"lacks llama\.block_count"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__rope__dimension_count": 8}, "partial rotary"),
        ({"llama__attention__sliding_window": 128}, "sliding-window"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama'"),
        ({"pre": "falcon"}, "pre-tokenizer 'falcon'"),
        ({"tensors": random_tensors(ROWS, qkv_bias=True)}, "attention biases"),
        ({"tensors": random_tensors(ROWS) | {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope factors"),
        (
            {"tensors": random_tensors(ROWS) | {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}},
            "ffn_gate_inp",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        _convert(tmp_path, **options)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize("content", [b"", b"not a model at all, but long enough", b"GGUF\x03\x00\x00\x00"])
def test_a_damaged_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="not a readable GGUF"):
        prepare_checkpoint(tmp_path / "bad.gguf", tmp_path / "cache", _silent)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", BACKEND, random_tensors(ROWS))
    source.write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(InvalidArgumentError, match="not a readable GGUF"):
        prepare_checkpoint(source, tmp_path / "cache", _silent)


def test_a_conversion_is_reused_and_follows_the_content(tmp_path: Path) -> None:
    first = _convert(tmp_path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    told: list[str] = []
    assert prepare_checkpoint(tmp_path / "tiny.gguf", tmp_path / "cache", told.append) == first
    assert (told, (first / "model.safetensors").stat().st_mtime_ns) == ([], written)
    assert _convert(tmp_path, llama__context_length=128) != first


def test_what_a_killed_conversion_left_is_not_used(tmp_path: Path) -> None:
    finished = _convert(tmp_path)
    expected = {path.name: path.read_bytes() for path in finished.iterdir()}
    unfinished = finished.with_name(f".{finished.name}.unfinished")
    finished.rename(unfinished)
    (unfinished / "model.safetensors").write_bytes(b"half")
    again = prepare_checkpoint(tmp_path / "tiny.gguf", tmp_path / "cache", _silent)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == expected
    assert not unfinished.exists()


def test_services_that_start_together_convert_once(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", BACKEND, random_tensors(ROWS))
    told: list[str] = []
    results: list[Path] = []

    def start() -> None:
        results.append(prepare_checkpoint(source, tmp_path / "cache", told.append))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert sum(line.startswith("reading") for line in told) == 1
