"""Random small decoders, as plain arrays and as native decoders that the engine can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.int8_twin import Floats, PlainLayer, PlainLinear, PlainModel
from treeserve_core.features import FeatureShape
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.decoder import Decoder, DecoderShape, DecoderWeights, HiddenStates, KvCache, LayerWeights
from treeserve_kernels.cpu.packing import PackedLinear, pack_linear


@dataclass(frozen=True)
class Sizes:
    """What a random decoder is made with. Its defaults are odd, so that vector code always has something left over."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 72
    intermediate_size: int = 150
    vocab_size: int = 203
    num_layers: int = 2
    max_positions: int = 1024
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = False


def random_model(sizes: Sizes, seed: int = 0) -> PlainModel:
    """Weights with which every part of the decoder moves the logits."""
    rng, s = np.random.default_rng(seed), sizes

    def normal(*shape: int, scale: float = 1.0) -> Floats:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(n: int) -> Floats:
        return 1 + normal(n, scale=0.2)

    def linear(outputs: int, inputs: int, *, has_bias: bool = False) -> PlainLinear:
        bias = normal(outputs, scale=0.3) if has_bias else None
        return PlainLinear(normal(outputs, inputs, scale=1.3 * inputs**-0.5), bias)

    def layer() -> PlainLayer:
        queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        return PlainLayer(
            input_norm=norm(s.hidden_size),
            qkv=linear(queries + 2 * keys, s.hidden_size, has_bias=s.has_qkv_bias),
            q_norm=norm(s.head_dim) if s.has_qk_norm else None,
            k_norm=norm(s.head_dim) if s.has_qk_norm else None,
            attention_output=linear(s.hidden_size, queries, has_bias=s.has_output_bias),
            feed_forward_norm=norm(s.hidden_size),
            gate_up=linear(2 * s.intermediate_size, s.hidden_size),
            down=linear(s.hidden_size, s.intermediate_size),
        )

    embedding = normal(s.vocab_size, s.hidden_size)
    frequencies = 100.0 ** -(np.arange(0, s.head_dim, 2) / s.head_dim)
    angles = np.arange(s.max_positions)[:, None] * frequencies
    return PlainModel(
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        rms_norm_eps=1e-5,
        embedding=embedding,
        layers=tuple(layer() for _ in range(s.num_layers)),
        norm=norm(s.hidden_size),
        head=PlainLinear(embedding) if s.is_tied else linear(s.vocab_size, s.hidden_size),
        rope_cos=np.cos(angles).astype(np.float32),
        rope_sin=np.sin(angles).astype(np.float32),
    )


def native_weights(plain: PlainModel) -> DecoderWeights:
    """The same weights, quantised and packed."""

    def packed(linear: PlainLinear, *, interleave: bool = False) -> PackedLinear:
        return pack_linear(linear.weight, linear.bias, interleave=interleave)

    layers = tuple(
        LayerWeights(
            input_norm=la.input_norm,
            qkv=packed(la.qkv),
            q_norm=la.q_norm,
            k_norm=la.k_norm,
            attention_output=packed(la.attention_output),
            feed_forward_norm=la.feed_forward_norm,
            gate_up=packed(la.gate_up, interleave=True),
            down=packed(la.down),
        )
        for la in plain.layers
    )
    return DecoderWeights(
        embedding=plain.embedding,
        layers=layers,
        norm=plain.norm,
        head=packed(plain.head),
        rope_cos=plain.rope_cos,
        rope_sin=plain.rope_sin,
    )


def native_shape(plain: PlainModel) -> DecoderShape:
    return DecoderShape(
        vocab_size=len(plain.embedding),
        hidden_size=plain.embedding.shape[1],
        intermediate_size=plain.layers[0].down.weight.shape[1],
        num_layers=len(plain.layers),
        num_heads=plain.num_heads,
        num_kv_heads=plain.num_kv_heads,
        head_dim=plain.head_dim,
        rms_norm_eps=plain.rms_norm_eps,
    )


def native_decoder(plain: PlainModel, *, threads: int = 1, isa: str | None = None) -> Decoder:
    return Decoder(native_shape(plain), native_weights(plain), threads=threads, isa=isa)


def batch_arguments(batch: Any) -> dict[str, Any]:
    """A `ForwardBatch` as the arguments of `Decoder.forward`."""
    not_passed = ("logits_offsets", "feature_rows", "feature_offsets")
    return {name: value for name, value in vars(batch).items() if name not in not_passed}


class NativeModel:
    """A `Model` of the engine that is a native decoder.

    Args:
        is_poisoned: every new cache is full of NaN (int8: enormous numbers), so that one stray read shows.
    """

    def __init__(
        self,
        plain: PlainModel,
        kv_dtype: str = "float32",
        *,
        threads: int = 1,
        isa: str | None = None,
        is_poisoned: bool = False,
    ) -> None:
        self.config = SimpleNamespace(vocab_size=len(plain.embedding), max_position_embeddings=len(plain.rope_cos))
        self.decoder = native_decoder(plain, threads=threads, isa=isa)
        self._kv_dtype = kv_dtype
        self._poisoner = _poisoner(plain, 1e30 if kv_dtype == "int8" else np.nan) if is_poisoned else None

    def new_kv(self, num_blocks: int, block_size: int) -> KvCache:
        kv = self.decoder.new_kv(num_blocks, block_size, self._kv_dtype)
        if self._poisoner:
            _fill(self._poisoner, kv)
        return kv

    def forward(self, batch: Any, kv: KvCache) -> Floats:
        return self.decoder.forward(kv, **batch_arguments(batch))

    def decode(
        self,
        kv: KvCache,
        block_tables: Sequence[Sequence[int]],
        sequences: Sequence[RunSequence],
        terms: RunTerms,
        choose: Choose,
    ) -> Ran:
        return self.decoder.run(kv, block_tables, sequences, terms, choose)

    @property
    def feature_shape(self) -> FeatureShape:
        shape = self.decoder.shape
        return FeatureShape.of_model(shape.num_layers, shape.hidden_size)

    def forward_hidden(self, batch: Any, kv: KvCache, layers: Sequence[int]) -> HiddenStates:
        feature_layers = np.array(layers, dtype=np.int64)
        return self.decoder.forward_hidden(kv, batch.feature_rows, feature_layers, **batch_arguments(batch))


def _poisoner(plain: PlainModel, poison: float) -> Decoder:
    """A decoder of the same shape, all of whose keys and values are `poison`."""
    weights = native_weights(plain)
    layers = []
    for layer in weights.layers:
        bias = np.full(len(layer.qkv.scales), poison, dtype=np.float32)
        layers.append(replace(layer, qkv=replace(layer.qkv, bias=bias), q_norm=None, k_norm=None))
    return Decoder(native_shape(plain), replace(weights, layers=tuple(layers)), threads=1)


def _fill(decoder: Decoder, kv: KvCache) -> None:
    """Write every slot of a cache: rows of one sequence that see nothing but themselves."""
    slots = np.arange(kv.num_blocks * kv.block_size)
    words = np.zeros((len(slots), -(-len(slots) // 64)), dtype=np.uint64)
    words[slots, slots // 64] = np.uint64(1) << (slots % 64).astype(np.uint64)
    decoder.forward(
        kv,
        input_ids=np.zeros_like(slots),
        positions=np.zeros_like(slots),
        slot_mapping=slots,
        block_tables=np.arange(kv.num_blocks, dtype=np.int32)[None],
        context_lens=np.zeros(1, dtype=np.int32),
        query_offsets=np.array([0, len(slots)], dtype=np.int32),
        node_offsets=np.zeros(1, dtype=np.int32),
        ancestor_words=words,
        block_size=kv.block_size,
        logits_indices=slots[:0],
    )
