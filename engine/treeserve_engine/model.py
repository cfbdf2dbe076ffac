"""A decoder of the Llama family over a ragged batch and a paged KV cache.

On a CPU it is exact: a token's logits and KV have the same bits alone, in a tree, beside other sequences and in a
prefill chunk. Every operation either treats rows one by one or is made to (`linear`, `tree_attention`, `swiglu`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from treeserve_core.features import FeatureShape
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.config import ModelConfig
from treeserve_engine.kv_cache import KvCache
from treeserve_engine.linear import Int8Linear, Linear, RowTiles, find_row_tiles, pieces_of_one_thread
from treeserve_engine.rope_torch import RotaryTable, rotate
from treeserve_engine.torch_batch import TorchBatch
from treeserve_engine.weights import FloatWeights, LayerTensors, LinearTensors
from treeserve_kernels.cpu.decoder import DecoderWeights, HiddenStates, LayerWeights
from treeserve_kernels.cpu.packing import PackedLinear, unpack_linear
from treeserve_kernels.dispatch import Attention, kernels_for


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear | Int8Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Linear | Int8Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear | Int8Linear
    down: Linear | Int8Linear


@dataclass(frozen=True)
class _Weights:
    embedding: torch.Tensor
    layers: tuple[_Layer, ...]
    norm: torch.Tensor
    head: Linear | Int8Linear

    def float_linears(self) -> list[Linear]:
        """Those whose rows depend on how many are computed."""
        of_layers = [(la.qkv, la.attention_output, la.gate_up, la.down) for la in self.layers]
        linears = [*(linear for layer in of_layers for linear in layer), self.head]
        return [linear for linear in linears if isinstance(linear, Linear)]


class LlamaModel:
    """Weights and the forward pass. Stateless between calls; the KV cache is the caller's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: _Weights,
        device: torch.device,
        kv_dtype: torch.dtype,
        attention: Attention | None = None,
    ) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = device
        self._kv_dtype = kv_dtype
        self._weights = weights
        kernels = kernels_for(device)
        self._attention = attention or kernels.attention
        self._write_kv = kernels.write_kv
        self._rotary = RotaryTable(config, device)
        self._tiles = find_row_tiles(weights.float_linears()) if device.type == "cpu" else RowTiles(())

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
        tensors = FloatWeights.of(folder, config, dtype, device)
        embedding = tensors.embedding()
        layers = tuple(_float_layer(layer) for layer in tensors.layers())
        weights = _Weights(embedding, layers, tensors.norm(), _float_linear(tensors.head(embedding)))
        return cls(config, weights, device, dtype, attention)

    @classmethod
    def from_int8(cls, config: ModelConfig, weights: DecoderWeights, kv_dtype: torch.dtype) -> Self:
        """The native decoder's twin on the CPU: the same int8 linears, float32 between them."""
        layers = tuple(_int8_layer(layer) for layer in weights.layers)
        assert weights.embedding is not None  # checkpoints have one
        own = _Weights(_tensor(weights.embedding), layers, _tensor(weights.norm), _int8_linear(weights.head))
        return cls(config, own, torch.device("cpu"), kv_dtype)

    @property
    def tile_sizes(self) -> tuple[int, ...]:
        """Row counts that are computed in one piece; none where any may be, exactly (int8) or not (GPUs)."""
        return self._tiles.sizes

    def new_kv(self, num_blocks: int, block_size: int) -> KvCache:
        """An empty cache."""
        return KvCache.allocate(self.config, num_blocks * block_size, self._kv_dtype, self.device, block_size)

    def forward(self, batch: ForwardBatch, kv: KvCache) -> npt.NDArray[np.float32]:
        """Compute the rows of a batch, writing their K and V to their slots.

        Returns:
            Logits of the rows asked for, float32[K, vocab_size].
        """
        logits: npt.NDArray[np.float32] = self.logits(TorchBatch.of(batch, self.device), kv).cpu().numpy()
        return logits

    @property
    def feature_shape(self) -> FeatureShape:
        """What drafters are sent of it."""
        return FeatureShape.of_model(self.config.num_layers, self.config.hidden_size)

    @torch.inference_mode()
    def forward_hidden(self, batch: ForwardBatch, kv: KvCache, layers: Sequence[int]) -> HiddenStates:
        """See `HiddenModel.forward_hidden`."""
        on_device = TorchBatch.of(batch, self.device)
        feature_rows = torch.from_numpy(batch.feature_rows).to(self.device)
        features = torch.empty((len(feature_rows), len(layers), self.config.hidden_size))

        def export(layers_behind: int, x: torch.Tensor) -> None:
            if layers_behind in layers:
                features[:, layers.index(layers_behind)] = x.index_select(0, feature_rows)

        x = self._residual(on_device, kv, batch.inputs, export)
        last = x.index_select(0, on_device.logits_indices)
        logits = self._logits(last)
        return HiddenStates(logits.cpu().numpy(), last.float().cpu().numpy(), features.numpy())

    @torch.inference_mode()
    def logits(self, batch: TorchBatch, kv: KvCache) -> torch.Tensor:
        """`forward` on the device: float32[K, vocab_size]."""
        return self._logits(self._residual(batch, kv).index_select(0, batch.logits_indices))

    def _residual(
        self,
        batch: TorchBatch,
        kv: KvCache,
        inputs: npt.NDArray[np.float32] | None = None,
        after_layer: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """The residual stream after the last layer, [padded rows, H].

        Args:
            after_layer: shown how many layers are behind, and the residual stream, which the next one overwrites.
        """
        rows = len(batch.input_ids)
        padding = self._tiles.padded(rows) - rows
        if inputs is None:
            x = self._weights.embedding.index_select(0, functional.pad(batch.input_ids, (0, padding)))
        else:
            own = torch.from_numpy(inputs).to(self.device, self.dtype, copy=True)
            x = functional.pad(own, (0, 0, 0, padding))
        rotation = self._rotary.at(batch.positions)
        for i, (layer, keys, values) in enumerate(zip(self._weights.layers, kv.keys, kv.values, strict=True)):
            attended = self._attend(layer, x, rotation, batch, keys, values)
            x.add_(layer.attention_output(functional.pad(attended, (0, 0, 0, padding)), self._tiles))
            x.add_(self._feed_forward(layer, x))
            if after_layer is not None:
                after_layer(i + 1, x)
        return x

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
        rotated = rotate(self._normed_heads(layer, qkv[:, :rotated_heads]), *rotation).to(self.dtype)
        self._write_kv(keys, batch.slot_mapping, rotated[:, config.num_heads :])
        self._write_kv(values, batch.slot_mapping, qkv[:, rotated_heads:])
        q = rotated[:, : config.num_heads]
        return self._attention(q, keys, values, batch.attention, config.head_dim**-0.5).view(rows, -1)

    def _normed_heads(self, layer: _Layer, heads: torch.Tensor) -> torch.Tensor:
        """Queries and keys [T, H + KVH, D] as they are rotated."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        q, k = torch.split(heads, [self.config.num_heads, self.config.num_kv_heads], 1)
        return torch.cat((self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)), 1)

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
    for piece in pieces_of_one_thread(gate):
        functional.silu(piece, inplace=True)
    return gate * up


def _float_layer(layer: LayerTensors) -> _Layer:
    return _Layer(
        layer.input_norm,
        _float_linear(layer.qkv),
        layer.q_norm,
        layer.k_norm,
        _float_linear(layer.attention_output),
        layer.feed_forward_norm,
        _float_linear(layer.gate_up),
        _float_linear(layer.down),
    )


def _float_linear(linear: LinearTensors) -> Linear:
    return Linear(linear.weight, linear.bias)


def _int8_layer(layer: LayerWeights) -> _Layer:
    return _Layer(
        _tensor(layer.input_norm),
        _int8_linear(layer.qkv),
        None if layer.q_norm is None else _tensor(layer.q_norm),
        None if layer.k_norm is None else _tensor(layer.k_norm),
        _int8_linear(layer.attention_output),
        _tensor(layer.feed_forward_norm),
        _int8_linear(layer.gate_up),
        _int8_linear(layer.down),
    )


def _int8_linear(packed: PackedLinear) -> Int8Linear:
    weight, scales = unpack_linear(packed)
    bias = None if packed.bias is None else _tensor(packed.bias[: packed.num_outputs])  # never interleaved
    return Int8Linear(torch.from_numpy(weight), torch.from_numpy(scales), bias)


def _tensor(array: npt.NDArray[np.float32]) -> torch.Tensor:
    """A copy: what is memory-mapped is read-only."""
    return torch.from_numpy(array.copy())
