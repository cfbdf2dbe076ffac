"""Writes tiny GGUF files the way llama.cpp's converter does, from tensors in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers import Tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (96, HIDDEN),
    "ffn_up": (96, HIDDEN),
    "ffn_down": (HIDDEN, 96),
}


def random_tensors(rows: int, *, qkv_bias: bool = False) -> dict[str, npt.NDArray[np.float32]]:
    """Weights under GGUF names, in Hugging Face's row order, with tied embeddings."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (rows, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in _SHAPES.items()}
        if qkv_bias:
            shapes |= {f"blk.{layer}.attn_{p}.bias": _SHAPES[f"attn_{p}"][:1] for p in "qkv"}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tokenizer: Tokenizer,
    tensors: Mapping[str, npt.NDArray[np.float32]],
    *,
    arch: str = "llama",
    pre: str = "gpt-2",
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    unused_tokens: int = 0,
    **overrides: Any,
) -> Path:
    """Write a GGUF file.

    Args:
        tensors: as `random_tensors` gives them; the llama architecture's interleaving is done here.
        quantization: of the matrices.
        overrides: metadata to replace, "__" for "."; None leaves a key out.
    """
    writer = GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    add_vocabulary(writer, tokenizer, unused_tokens)
    for name, values in tensors.items():
        data = _interleaved(name, values) if arch == "llama" else values
        kind = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: GGUFWriter, tokenizer: Tokenizer, unused_tokens: int) -> None:
    spec = json.loads(tokenizer.to_str())
    vocab = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    kinds = {
        token["content"]: TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        for token in spec["added_tokens"]
    }
    tokens = [token for token, _ in vocab]
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(unused_tokens))])
    types = [kinds.get(token, TokenType.NORMAL) for token in tokens]
    writer.add_token_types([*types, *[TokenType.UNUSED] * unused_tokens])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])


def _interleaved(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rows of each head as llama.cpp stores them: 0, d/2, 1, d/2 + 1, ..."""
    heads = HEADS if ".attn_q." in name else KV_HEADS if ".attn_k." in name else None
    if heads is None:
        return values
    head_dim = len(values) // heads
    order = np.arange(head_dim).reshape(2, -1).T.ravel()
    rows = (np.arange(heads)[:, None] * head_dim + order).ravel()
    return np.ascontiguousarray(values[rows])
