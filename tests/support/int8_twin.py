"""The int8 decoder once more, in plain numpy: linears with exactly its arithmetic, the rest in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.features import FeatureShape
from treeserve_kernels.cpu.decoder import HiddenStates

Floats = npt.NDArray[np.float32]
GROUP = 64
SMALLEST = 1e-30  # what is no larger is quantised to zero


@dataclass(frozen=True)
class PlainLinear:
    """A linear layer before it is quantised: weight float32[N, K], bias float32[N]."""

    weight: Floats
    bias: Floats | None = None


@dataclass(frozen=True)
class PlainLayer:
    input_norm: Floats
    qkv: PlainLinear
    q_norm: Floats | None
    k_norm: Floats | None
    attention_output: PlainLinear
    feed_forward_norm: Floats
    gate_up: PlainLinear  # the gates' rows, then as many of the others
    down: PlainLinear


@dataclass(frozen=True)
class PlainModel:
    """A whole decoder before it is quantised. rope tables: float32[positions, head_dim / 2]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    embedding: Floats
    layers: tuple[PlainLayer, ...]
    norm: Floats
    head: PlainLinear
    rope_cos: Floats
    rope_sin: Floats


def quantize(values: Floats) -> tuple[Floats, Floats]:
    """Symmetric int8 over the last axis: whole numbers in [-127, 127] as float32, and the scales, absmax / 127."""
    largest = np.abs(values).max(-1, keepdims=True)
    scales = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > SMALLEST)
    return np.rint(values * inverse), scales[..., 0]


class Int8Linear:
    """w8a8 with one scale per output and one per row and group of 64 inputs."""

    def __init__(self, plain: PlainLinear) -> None:
        self.weight, self.scales = quantize(plain.weight)
        self._bias = plain.bias

    def __call__(self, x: npt.NDArray[Any]) -> Floats:
        """float32[T, K] to float32[T, N]: integer sums are exact in float32, and the rest has a fixed order."""
        x = x.astype(np.float32)
        total = np.zeros((len(x), len(self.weight)), dtype=np.float32)
        for start in range(0, x.shape[1], GROUP):
            q, scales = quantize(x[:, start : start + GROUP])
            sums = q @ self.weight[:, start : start + GROUP].T
            total = total + sums * scales[:, None]
        total = total * self.scales
        return total if self._bias is None else total + self._bias


@dataclass(frozen=True)
class TwinKv:
    """Keys and values by layer, float32[num_slots, KVH, D], NaN where nothing was written."""

    dtype: str
    keys: tuple[Floats, ...]
    values: tuple[Floats, ...]

    def move(self, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]) -> None:
        for cache in (*self.keys, *self.values):
            for s, d in zip(src, dst, strict=True):
                cache[d] = cache[s]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in (*self.keys, *self.values))

    def rounded(self, x: npt.NDArray[Any]) -> Floats:
        """Keys or values [T, KVH, D] as this cache stores them."""
        x = x.astype(np.float32)
        if self.dtype == "bfloat16":
            bits = x.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        if self.dtype == "int8":
            q, scales = quantize(x)
            return q * scales[..., None]
        return x


class Int8Twin:
    """A `Model` of the engine with an int8 decoder's numbers."""

    def __init__(self, plain: PlainModel, kv_dtype: str = "float32") -> None:
        self.config = SimpleNamespace(vocab_size=len(plain.embedding), max_position_embeddings=len(plain.rope_cos))
        self._plain = plain
        self._kv_dtype = kv_dtype
        self._linears = [
            tuple(Int8Linear(linear) for linear in (la.qkv, la.attention_output, la.gate_up, la.down))
            for la in plain.layers
        ]
        self._head = Int8Linear(plain.head)

    @property
    def feature_shape(self) -> FeatureShape:
        return FeatureShape.of_model(len(self._plain.layers), self._plain.embedding.shape[1])

    def new_kv(self, num_blocks: int, block_size: int) -> TwinKv:
        shape = (num_blocks * block_size, self._plain.num_kv_heads, self._plain.head_dim)

        def caches() -> tuple[Floats, ...]:
            return tuple(np.full(shape, np.nan, dtype=np.float32) for _ in self._plain.layers)

        return TwinKv(self._kv_dtype, caches(), caches())

    def forward(self, batch: Any, kv: TwinKv) -> Floats:
        return self.forward_hidden(batch, kv, ()).logits

    def forward_hidden(self, batch: Any, kv: TwinKv, layers: Sequence[int]) -> HiddenStates:
        plain, states = self._plain, []
        visible = _visible_slots(batch)
        angles = plain.rope_cos[batch.positions][:, None], plain.rope_sin[batch.positions][:, None]
        x = (plain.embedding[batch.input_ids] if batch.inputs is None else batch.inputs).astype(np.float64)
        for layer, linears, keys, values in zip(plain.layers, self._linears, kv.keys, kv.values, strict=True):
            qkv, attention_output, gate_up, down = linears
            heads = qkv(self._normed(x, layer.input_norm)).reshape(len(x), -1, plain.head_dim).astype(np.float64)
            q, k, v = np.split(heads, [plain.num_heads, plain.num_heads + plain.num_kv_heads], axis=1)
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            keys[batch.slot_mapping] = kv.rounded(_rotated(k, *angles))
            values[batch.slot_mapping] = kv.rounded(v)
            attended = _attend(_rotated(q, *angles), keys, values, visible)
            x = x + attention_output(attended.reshape(len(x), -1))
            gate, up = np.split(gate_up(self._normed(x, layer.feed_forward_norm)).astype(np.float64), 2, axis=1)
            x = x + down(gate / (1 + np.exp(-gate)) * up)
            states.append(x)
        features = [states[layer - 1][batch.feature_rows] for layer in layers]
        last = x[batch.logits_indices]
        logits = self._head(self._normed(last, plain.norm))
        return HiddenStates(logits, last, np.stack(features, 1) if features else np.empty((0, 0, x.shape[1])))

    def _normed(self, x: npt.NDArray[np.float64], weight: Floats | None) -> npt.NDArray[np.float64]:
        if weight is None:
            return x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self._plain.rms_norm_eps) * weight


def _rotated(x: npt.NDArray[np.float64], cos: Floats, sin: Floats) -> npt.NDArray[np.float64]:
    """Turn the pairs (x[i], x[i + D / 2]) of [T, heads, D]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _visible_slots(batch: Any) -> list[npt.NDArray[np.int64]]:
    """The slots each row sees, in the order of their positions."""
    slots = []
    for s, (first, last) in enumerate(pairwise(batch.query_offsets.tolist())):
        context, table = int(batch.context_lens[s]), batch.block_tables[s].astype(np.int64)
        for words in batch.ancestor_words[first:last]:
            mask = int.from_bytes(words.astype("<u8").tobytes(), "little")
            nodes = [node for node in range(mask.bit_length()) if mask >> node & 1]
            positions = np.array([*range(context), *(context + node for node in nodes)], dtype=np.int64)
            slots.append(table[positions // batch.block_size] * batch.block_size + positions % batch.block_size)
    return slots


def _attend(
    q: npt.NDArray[np.float64], keys: Floats, values: Floats, visible: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float64]:
    group = q.shape[1] // keys.shape[1]
    rows = []
    for row, slots in zip(q, visible, strict=True):
        k, v = keys[slots].astype(np.float64), values[slots].astype(np.float64)
        scores = np.einsum("hgd,phd->hgp", row.reshape(keys.shape[1], group, -1), k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        rows.append(np.einsum("hgp,phd->hgd", weights / weights.sum(-1, keepdims=True), v).reshape(row.shape))
    return np.stack(rows)
