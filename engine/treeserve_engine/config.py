"""The architecture of a model, read from its config.json. Models this engine would run wrongly are refused here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError

_MOST_POSITIONS = 1 << 20
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Where config.json does not say, as in transformers.
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


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
        max_position_embeddings: the context window, 2^20 at most: up to there rotary angles are exact. Within a sliding
            window attention is full attention, so a model with one is served up to that length.
        qkv_bias: the query, key and value projections have a bias.
        output_bias: the attention's output projection has a bias.
        qk_norm: each head's queries and keys are normalised before they are rotated.
        sliding_window: tokens that attention reaches back, where the model limits it.
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
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidArgumentError("model", f"{name} is {value}; it must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgumentError(
                "model", f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise InvalidArgumentError("model", f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        if not 0.0 <= self.rms_norm_eps < math.inf:
            raise InvalidArgumentError("model", f"rms_norm_eps {self.rms_norm_eps} is no small positive number")
        scale = self.rope_scaling.factor if self.rope_scaling is not None else 1.0
        if not (0.0 < self.rope_theta < math.inf and 0.0 < scale < math.inf):
            raise InvalidArgumentError("model", f"rotary base {self.rope_theta} with factor {scale} gives no angles")


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json, in the style of transformers 4 or 5.

    Raises:
        InvalidArgumentError: if the file is missing or broken, or the model needs something this engine does not do.
    """
    raw = raw_config(folder)
    try:
        return _model_config(raw)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidArgumentError("model", f"config.json makes no sense: {error}") from error


def _model_config(raw: Mapping[str, Any]) -> ModelConfig:
    _check_supported(raw)
    rope = _rope_parameters(raw)
    num_heads = _required(raw, "num_attention_heads")
    hidden_size = _required(raw, "hidden_size")
    is_qwen2, is_qwen3 = (raw["model_type"] == name for name in ("qwen2", "qwen3"))
    attention_bias = bool(raw.get("attention_bias", False))
    window = _sliding_window(raw)
    max_positions = min(_required(raw, "max_position_embeddings"), _MOST_POSITIONS)
    return ModelConfig(
        vocab_size=_required(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(raw, "intermediate_size"),
        num_layers=_required(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or (_QWEN3_HEAD_DIM if is_qwen3 else hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, raw),
        max_position_embeddings=max_positions if window is None else min(max_positions, window),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or attention_bias,  # Qwen2 always has it, and its config.json does not say so
        output_bias=attention_bias and not is_qwen2,
        qk_norm=is_qwen3,
        sliding_window=window,
    )


def is_llama_like(folder: Path) -> bool:
    """Whether `load_config` takes the model's type; it may still refuse a variant.

    Raises:
        InvalidArgumentError: if config.json is missing or broken.
    """
    return raw_config(folder).get("model_type") in _MODEL_TYPES


def raw_config(folder: Path) -> dict[str, Any]:
    """`folder`/config.json as it is.

    Raises:
        InvalidArgumentError: if the file is missing or broken.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgumentError("model", f"{folder} holds no config.json") from None
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
    if "sliding_attention" in (raw.get("layer_types") or ()) or raw.get("use_sliding_window"):
        raise InvalidArgumentError("model", "sliding-window attention in some layers is not supported")


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Mistral's window, the same in all layers."""
    if raw["model_type"] != "mistral" or raw.get("sliding_window", _MISTRAL_WINDOW) is None:
        return None
    return _required({"sliding_window": _MISTRAL_WINDOW, **raw}, "sliding_window")


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
