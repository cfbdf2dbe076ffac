"""A checkpoint's tensors in torch: by name, and as the decoders want them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import ModelConfig
from treeserve_engine.weight_files import weight_files


@dataclass(frozen=True)
class LinearTensors:
    """Weight [N, K] and bias [N] of a linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerTensors:
    """One decoder layer. qkv: queries, keys, values; gate_up: gates, then the others. q_norm, k_norm: [D] or None."""

    input_norm: torch.Tensor
    qkv: LinearTensors
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: LinearTensors
    feed_forward_norm: torch.Tensor
    gate_up: LinearTensors
    down: LinearTensors


class FloatWeights:
    """The tensors of a Llama-like checkpoint: projections of one input joined, each shape checked.

    They are read from disk when asked for and not kept.

    Args:
        dtype: what they are converted to.
        device: where they go.

    Raises:
        InvalidArgumentError: from every method, if a tensor is missing or has another shape than `config` says.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._dtype = dtype
        self._device = device

    @classmethod
    def of(cls, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Self:
        """Those of a Hugging Face folder."""
        return cls(load_tensors(folder), config, dtype, device)

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self._tensor("model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size)

    def norm(self) -> torch.Tensor:
        """Of the last hidden states: [hidden_size]."""
        return self._tensor("model.norm.weight", self._config.hidden_size)

    def head(self, embedding: torch.Tensor) -> LinearTensors:
        """The output layer; the embedding again where they are tied."""
        if self._config.tie_word_embeddings:
            return LinearTensors(embedding)
        return LinearTensors(self._tensor("lm_head.weight", self._config.vocab_size, self._config.hidden_size))

    def layers(self) -> Iterator[LayerTensors]:
        """All decoder layers, one in memory at a time."""
        return (self._layer(f"model.layers.{i}") for i in range(self._config.num_layers))

    def _layer(self, name: str) -> LayerTensors:
        c = self._config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        projections = {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
        feed_forward = {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size}
        return LayerTensors(
            input_norm=self._tensor(f"{name}.input_layernorm.weight", c.hidden_size),
            qkv=self._linear(projections, c.hidden_size, c.qkv_bias),
            q_norm=self._tensor(f"{attention}.q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=self._tensor(f"{attention}.k_norm.weight", c.head_dim) if c.qk_norm else None,
            attention_output=self._linear({f"{attention}.o_proj": c.hidden_size}, q, c.output_bias),
            feed_forward_norm=self._tensor(f"{name}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._linear(feed_forward, c.hidden_size, False),
            down=self._linear({f"{mlp}.down_proj": c.hidden_size}, c.intermediate_size, False),
        )

    def _linear(self, outputs: Mapping[str, int], inputs: int, has_bias: bool) -> LinearTensors:
        """One layer that computes several projections of the same input, one after the other."""
        weight = torch.cat([self._tensor(f"{name}.weight", n, inputs) for name, n in outputs.items()])
        bias = torch.cat([self._tensor(f"{name}.bias", n) for name, n in outputs.items()]) if has_bias else None
        return LinearTensors(weight, bias)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._tensors:
            raise InvalidArgumentError("model", f"the checkpoint lacks {name}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise InvalidArgumentError("model", f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
        return tensor.to(self._device, self._dtype)


def load_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    """All tensors of a checkpoint by name, on the CPU in their stored dtype; read when asked for, not kept.

    Raises:
        InvalidArgumentError: if a file is missing or damaged.
    """
    files: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise InvalidArgumentError("model", f"{path} is damaged: {error}") from error
        files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]
    return _Tensors(files)


class _Tensors(Mapping[str, torch.Tensor]):
    """Tensors by name. A tensor is read from disk when it is asked for."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
