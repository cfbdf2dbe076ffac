"""The architecture of a model, read from its config.json. Models this engine would run wrongly are refused here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError

_MODEL_TYPES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling: wavelengths longer than `original_max_position_embeddings` / `low_freq_factor` are
    stretched by `factor`, those shorter than `original_max_position_embeddings` / `high_freq_factor` are kept, and
    those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearRopeScaling | Llama3RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, rotary positions (half-split), grouped-query attention, SwiGLU.

    Attributes:
        vocab_size: rows of the embedding and of the output layer, padding included.
        head_dim: width of one attention head; num_heads * head_dim need not be hidden_size.
        rope_scaling: None for plain rotary positions.
        qkv_bias: the query, key and value projections have a bias.
        output_bias: the attention's output projection has a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidArgumentError("model", f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgumentError(
                "model", f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise InvalidArgumentError("model", f"head_dim {self.head_dim} is odd; rotary positions need pairs")


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json, in the style of transformers 4 or 5.

    Raises:
        InvalidArgumentError: if the file is missing or broken, or the model needs something this engine does not do.
    """
    raw = _read_config(folder / "config.json")
    _check_supported(raw)
    rope = _rope_parameters(raw)
    num_heads = _required(raw, "num_attention_heads")
    hidden_size = _required(raw, "hidden_size")
    is_qwen2 = raw["model_type"] == "qwen2"
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        vocab_size=_required(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(raw, "intermediate_size"),
        num_layers=_required(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, raw),
        max_position_embeddings=_required(raw, "max_position_embeddings"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or attention_bias,  # Qwen2 always has it, and its config.json does not say so
        output_bias=attention_bias and not is_qwen2,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgumentError("model", f"{path.parent} holds no config.json") from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("model", f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidArgumentError("model", f"{path} is not a JSON object")
    return raw


def _required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentError("model", f"config.json lacks the integer {key}")
    return value


def _check_supported(raw: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for what would change the computation and is not implemented."""
    model_type = raw.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise InvalidArgumentError("model", f"type {model_type!r} is not supported ({', '.join(_MODEL_TYPES)} are)")
    if raw.get("quantization_config"):
        raise InvalidArgumentError(
            "model", "quantised checkpoints are not supported; use plain weights or a .gguf file"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidArgumentError("model", f"activation {raw['hidden_act']!r} is not supported (silu is)")
    if raw.get("mlp_bias"):
        raise InvalidArgumentError("model", "biases in the feed-forward layers are not supported")
    windowed = "sliding_attention" in (raw.get("layer_types") or ())
    if model_type == "qwen2":
        windowed = windowed or bool(raw.get("use_sliding_window", False))
    elif model_type == "mistral":
        windowed = windowed or raw.get("sliding_window", 4096) is not None  # transformers' default is 4096
    if windowed:
        raise InvalidArgumentError("model", "sliding-window attention is not supported")


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 nests them (`rope_parameters`), or gathered from where version 4 put them."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    for key in ("rope_theta", "partial_rotary_factor"):
        if raw.get(key) is not None:
            rope.setdefault(key, raw[key])
    return rope


def _rope_scaling(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling | None:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidArgumentError("model", "partial rotary positions are not supported")
    kind = rope.get("rope_type", "default")
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearRopeScaling(float(rope["factor"]))
        if kind == "llama3":
            return Llama3RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(
                    rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
                ),
            )
    except KeyError as error:
        raise InvalidArgumentError("model", f"rope type {kind!r} lacks {error.args[0]!r}") from None
    raise InvalidArgumentError("model", f"rope type {kind!r} is not supported (default, linear and llama3 are)")
