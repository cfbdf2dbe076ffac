"""config.json, generation_config.json and model.safetensors out of a GGUF file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.gguf_file import GgufFile
from treeserve_engine.weight_files import SINGLE_FILE

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def write_config(file: GgufFile, folder: Path) -> None:
    """Write config.json and generation_config.json of one of ARCHITECTURES.

    Raises:
        InvalidArgumentError: if something that the file states about the model is not supported.
    """
    arch = file.architecture
    heads = file.integer(f"{arch}.attention.head_count")
    hidden_size = file.integer(f"{arch}.embedding_length")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden_size // heads)
    _check_attention(file, head_dim)
    names = file.tensor_names
    token_ids = special_token_ids(file)
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.integer(f"{arch}.context_length"),
        "rms_norm_eps": _shortest(file.required(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(file.get(f"{arch}.rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_output.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "float32",
        **token_ids,
    }
    scaling = file.get(f"{arch}.rope.scaling.factor")
    if file.get(f"{arch}.rope.scaling.type") == "linear" and scaling is not None:
        config["rope_scaling"] = {"rope_type": "linear", "factor": _shortest(scaling)}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_ids)


def write_weights(file: GgufFile, folder: Path) -> None:
    """Write model.safetensors in float32, one tensor in memory at a time.

    Raises:
        InvalidArgumentError: for a tensor this architecture does not have.
    """
    names = {name: _hf_name(name) for name in file.tensor_names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, hf_name in names.items():
        shape = file.shape(name)
        end = offset + 4 * int(np.prod(shape))
        header[hf_name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants the data aligned
    with (folder / SINGLE_FILE).open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for name in names:
            out.write(_hf_layout(file, name).astype("<f4", copy=False).data)


def _hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise InvalidArgumentError("model", f"GGUF tensor {name!r} belongs to no supported architecture")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _hf_layout(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    """A tensor's values with rotary pairs as (i, i + head_dim / 2).

    llama.cpp rotates neighbours (2i, 2i + 1) in the llama architecture, so its converter interleaves the rows of each
    query and key head; this undoes it. In qwen2 both sides rotate halves.
    """
    values = file.tensor(name)
    match = _LAYER_TENSOR.fullmatch(name)
    if file.architecture != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return values
    heads = file.integer("llama.attention.head_count")
    if match[2] == "attn_k":
        heads = file.integer("llama.attention.head_count_kv", heads)
    rows = values.shape[0]
    paired = values.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def _check_attention(file: GgufFile, head_dim: int) -> None:
    arch = file.architecture
    if file.get(f"{arch}.attention.sliding_window"):
        raise InvalidArgumentError("model", "sliding-window attention is not supported")
    has_bias = ["blk.0.attn_q.bias" in file.tensor_names, "blk.0.attn_output.bias" in file.tensor_names]
    if has_bias not in ([[True, False]] if arch == "qwen2" else [[False, False], [True, True]]):
        raise InvalidArgumentError("model", f"a {arch} model with these attention biases is not supported")
    if file.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise InvalidArgumentError("model", "partial rotary positions are not supported")
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise InvalidArgumentError("model", f"rope scaling {kind!r} is not supported in GGUF files")
    if "rope_freqs.weight" in file.tensor_names:
        raise InvalidArgumentError(
            "model", "this GGUF file holds ready rope factors (Llama 3.1 and later); use the original folder instead"
        )


def special_token_ids(file: GgufFile) -> dict[str, Any]:
    """Ids for config.json and generation_config.json; end-of-turn and end-of-message ids end a generation too."""
    ends = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = sorted({token_id for token_id in ends if token_id is not None})
    ids = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
