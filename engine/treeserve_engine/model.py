"""A decoder of the Llama family over a ragged batch and a paged KV cache.

On a CPU it is exact: a token's logits and KV have the same bits alone, in a tree, beside other sequences and in a
prefill chunk. Every operation either treats rows one by one or is made to (`linear`, `tree_attention`, `swiglu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.config import ModelConfig
from treeserve_engine.kv_cache import KvCache
from treeserve_engine.linear import Linear, RowTiles, find_row_tiles
from treeserve_engine.rope import RotaryTable, rotate
from treeserve_engine.torch_batch import TorchBatch
from treeserve_engine.weights import load_tensors
from treeserve_kernels.kv import write_kv
from treeserve_kernels.tree_attention import TreeAttentionMeta, tree_attention

# torch splits an elementwise operation of this many elements between threads, anywhere in a row.
_THREADED_ELEMENTS = 32768


class Attention(Protocol):
    """The signature of `tree_attention`, which its kernels share."""

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: TreeAttentionMeta, scale: float
    ) -> torch.Tensor:
        """Attend from every row to its visible KV."""


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    attention_output: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class _Weights:
    embedding: torch.Tensor
    layers: tuple[_Layer, ...]
    norm: torch.Tensor
    head: Linear

    def linears(self) -> list[Linear]:
        of_layers = [(la.qkv, la.attention_output, la.gate_up, la.down) for la in self.layers]
        return [*(linear for layer in of_layers for linear in layer), self.head]


class LlamaModel:
    """Weights and the forward pass. Stateless between calls; the KV cache is the caller's."""

    def __init__(
        self, config: ModelConfig, weights: _Weights, dtype: torch.dtype, device: torch.device, attention: Attention
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._attention = attention
        self._rotary = RotaryTable(config, device)
        self._tiles = find_row_tiles(weights.linears()) if device.type == "cpu" else RowTiles(())

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        attention: Attention | None = None,
    ) -> Self:
        """Load a Hugging Face folder.

        On a CPU, load and run in one thread: torch's thread count belongs to the calling thread, row tiles are tried
        with it, and a second calling thread would get a second team of workers that gets in the way of the first.

        Args:
            folder: holds safetensors weights.
            config: its `load_config`.
            dtype: of weights, activations and KV: float32 or bfloat16.
            device: where everything lives.
            attention: by default the torch twin on a CPU and the Triton kernel on a GPU.

        Raises:
            InvalidArgumentError: if weights are missing or have other shapes than `config` says.
        """
        weights = _WeightReader(load_tensors(folder), config, dtype, device).read()
        return cls(config, weights, dtype, device, attention or _default_attention(device))

    @property
    def tile_sizes(self) -> tuple[int, ...]:
        """Row counts that are computed in one piece; none where results are not exact."""
        return self._tiles.sizes

    def new_kv(self, num_blocks: int, block_size: int) -> KvCache:
        """An empty cache."""
        return KvCache.allocate(self.config, num_blocks * block_size, self.dtype, self.device)

    def forward(self, batch: ForwardBatch, kv: KvCache) -> npt.NDArray[np.float32]:
        """Compute the rows of a batch, writing their K and V to their slots.

        Returns:
            Logits of the rows asked for, float32[K, vocab_size].
        """
        logits: npt.NDArray[np.float32] = self.logits(TorchBatch.of(batch, self.device), kv).cpu().numpy()
        return logits

    @torch.inference_mode()
    def logits(self, batch: TorchBatch, kv: KvCache) -> torch.Tensor:
        """`forward` on the device: float32[K, vocab_size]."""
        rows = len(batch.input_ids)
        padding = self._tiles.padded(rows) - rows
        x = self._weights.embedding.index_select(0, functional.pad(batch.input_ids, (0, padding)))
        rotation = self._rotary.at(batch.positions)
        for layer, keys, values in zip(self._weights.layers, kv.keys, kv.values, strict=True):
            attended = self._attend(layer, x, rotation, batch, keys, values)
            x.add_(layer.attention_output(functional.pad(attended, (0, 0, 0, padding)), self._tiles))
            x.add_(self._feed_forward(layer, x))
        return self._logits(x.index_select(0, batch.logits_indices))

    def _attend(
        self,
        layer: _Layer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: TorchBatch,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of the real rows, before its output projection: [T, H * D]."""
        config, rows = self.config, len(batch.input_ids)
        qkv = layer.qkv(self._normed(x, layer.input_norm), self._tiles)[:rows].view(rows, -1, config.head_dim)
        rotated_heads = config.num_heads + config.num_kv_heads
        rotated = rotate(qkv[:, :rotated_heads], *rotation).to(self.dtype)
        write_kv(keys, batch.slot_mapping, rotated[:, config.num_heads :])
        write_kv(values, batch.slot_mapping, qkv[:, rotated_heads:])
        q = rotated[:, : config.num_heads]
        return self._attention(q, keys, values, batch.attention, config.head_dim**-0.5).view(rows, -1)

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._normed(x, layer.feed_forward_norm), self._tiles)
        return layer.down(swiglu(gate_up), self._tiles)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if rows == 0:
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        x = functional.pad(x, (0, 0, 0, self._tiles.padded(rows) - rows))
        return self._weights.head(self._normed(x, self._weights.norm), self._tiles)[:rows].float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 n] with the gates in front; overwrites the gates.

    torch's vector code for SiLU and its scalar code for what is left at the end of a stretch differ in the last bit.
    The gates are cut into pieces of whole rows that one thread gets; a row's gates do not touch the next row's, so
    that every stretch is one row.
    """
    gate, up = gate_up.chunk(2, 1)
    for piece in torch.split(gate, max(1, (_THREADED_ELEMENTS - 1) // gate.shape[1])):
        functional.silu(piece, inplace=True)
    return gate * up


def _default_attention(device: torch.device) -> Attention:
    if device.type != "cuda":
        return tree_attention
    from treeserve_kernels.triton.tree_attention import tree_attention_triton

    return tree_attention_triton


@dataclass(frozen=True)
class _WeightReader:
    """Reads a checkpoint's tensors into the model's layout, checking each shape."""

    tensors: Mapping[str, torch.Tensor]
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def read(self) -> _Weights:
        c = self.config
        embedding = self._tensor("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        head = embedding
        if not c.tie_word_embeddings:
            head = self._tensor("lm_head.weight", c.vocab_size, c.hidden_size)
        return _Weights(
            embedding,
            tuple(self._layer(f"model.layers.{i}") for i in range(c.num_layers)),
            self._tensor("model.norm.weight", c.hidden_size),
            Linear(head),
        )

    def _layer(self, name: str) -> _Layer:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        projections = {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
        feed_forward = {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size}
        return _Layer(
            self._tensor(f"{name}.input_layernorm.weight", c.hidden_size),
            self._linear(projections, c.hidden_size, c.qkv_bias),
            self._linear({f"{attention}.o_proj": c.hidden_size}, q, c.output_bias),
            self._tensor(f"{name}.post_attention_layernorm.weight", c.hidden_size),
            self._linear(feed_forward, c.hidden_size, False),
            self._linear({f"{mlp}.down_proj": c.hidden_size}, c.intermediate_size, False),
        )

    def _linear(self, outputs: Mapping[str, int], inputs: int, has_bias: bool) -> Linear:
        """One layer that computes several projections of the same input, one after the other."""
        weight = torch.cat([self._tensor(f"{name}.weight", n, inputs) for name, n in outputs.items()])
        bias = torch.cat([self._tensor(f"{name}.bias", n) for name, n in outputs.items()]) if has_bias else None
        return Linear(weight, bias)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.tensors:
            raise InvalidArgumentError("model", f"the checkpoint lacks {name}")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise InvalidArgumentError("model", f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
        return tensor.to(self.device, self.dtype)
