"""The native decoder: a whole forward pass over a ragged, paged batch in one call.

A row's logits and KV have the same bits whatever else is computed with it, on every instruction set, with any number
of threads, and wherever its KV lies.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treeserve_kernels.cpu import library
from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.library import address
from treeserve_kernels.cpu.packing import (
    ALIGNMENT,
    GROUP_INPUTS,
    HALF_PANEL,
    PANEL_OUTPUTS,
    STEP_INPUTS,
    Float32Array,
    PackedLinear,
)

KV_DTYPES = ("float32", "bfloat16", "int8")

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder of the Llama family. head_dim is even and at most 512."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One layer. H is the hidden size, D the head dimension.

    Attributes:
        input_norm: float32[H].
        qkv: all query heads, then the key heads, then the value heads.
        q_norm: float32[D] if each query head is normalised before rotation, else None.
        k_norm: the same for key heads.
        attention_output: from all query heads to H.
        feed_forward_norm: float32[H].
        gate_up: gates in front; packed with `interleave`.
        down: from the intermediate size to H.
    """

    input_norm: Float32Array
    qkv: PackedLinear
    q_norm: Float32Array | None
    k_norm: Float32Array | None
    attention_output: PackedLinear
    feed_forward_norm: Float32Array
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights; every array is C-contiguous and may be memory-mapped. P is the number of rotary positions.

    Attributes:
        embedding: float32[V, H].
        layers: from the first to the last.
        norm: float32[H], before the head.
        head: from H to V, or to the fewer tokens that a drafter can say.
        rope_cos: float32[P, D / 2].
        rope_sin: float32[P, D / 2].
    """

    embedding: Float32Array
    layers: Sequence[LayerWeights]
    norm: Float32Array
    head: PackedLinear
    rope_cos: Float32Array
    rope_sin: Float32Array


class KvCache:
    """Keys and values of every layer by slot, in the decoder's own memory. All zeros at first."""

    def __init__(self, shape: DecoderShape, num_blocks: int, block_size: int, dtype: str) -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {dtype!r}; it is one of {', '.join(KV_DTYPES)}")
        handle = ctypes.c_void_p()
        library.check(
            library.load().ts_kv_create(
                _shape(shape, 1), num_blocks, block_size, KV_DTYPES.index(dtype), ctypes.byref(handle)
            )
        )
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._shape = shape
        self._handle = handle
        self._free = weakref.finalize(self, library.load().ts_kv_destroy, handle)

    @property
    def nbytes(self) -> int:
        """Memory it takes once every slot was written."""
        size: int = library.load().ts_kv_nbytes(self._handle)
        return size

    def move(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy slot src[i] to slot dst[i] in every layer, in the order of i.

        Raises:
            ValueError: if a slot is out of range or the arrays differ in length; nothing was copied.
        """
        sources, destinations = np.ascontiguousarray(src, np.int64), np.ascontiguousarray(dst, np.int64)
        if sources.ndim != 1 or sources.shape != destinations.shape:
            raise ValueError(f"slots of shapes {sources.shape} and {destinations.shape} to move")
        moved = library.load().ts_kv_move(self._handle, len(sources), address(sources), address(destinations))
        library.check(moved)


class Decoder:
    """Computes forward passes with a fixed team of threads, the calling one included."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights, *, threads: int, isa: str | None = None) -> None:
        """Check all sizes and start the threads.

        Args:
            shape: the sizes.
            weights: kept alive, not copied.
            threads: at least 1; 1 starts none.
            isa: one of `library.isas()`; the best by default.

        Raises:
            ValueError: if a size is wrong, an array is not aligned as `packing` aligns it, or this CPU lacks `isa`.
            OSError: if the shared object is missing.
        """
        self.isa = isa or library.isas()[0]
        self.shape = shape
        self._num_outputs = weights.head.num_outputs
        self._kept = weights
        packed = _weights(shape, weights)
        handle = ctypes.c_void_p()
        created = library.load().ts_decoder_create(
            _shape(shape, len(weights.rope_cos)), packed, threads, self.isa.encode(), ctypes.byref(handle)
        )
        library.check(created)
        self._handle = handle
        self._forward = library.load().ts_decoder_forward
        self._free = weakref.finalize(self, library.load().ts_decoder_destroy, handle)

    def new_kv(self, num_blocks: int, block_size: int, dtype: str) -> KvCache:
        """A KV cache of `num_blocks` blocks of `block_size` slots, "float32", "bfloat16" or "int8".

        Raises:
            ValueError: if a size is below 1 or the dtype is another.
            MemoryError: if it does not fit into memory.
        """
        return KvCache(self.shape, num_blocks, block_size, dtype)

    def forward(
        self,
        kv: KvCache,
        *,
        input_ids: Int64Array,
        positions: Int64Array,
        slot_mapping: Int64Array,
        block_tables: Int32Array,
        context_lens: Int32Array,
        query_offsets: Int32Array,
        node_offsets: Int32Array,
        ancestor_words: npt.NDArray[np.uint64],
        block_size: int,
        logits_indices: Int64Array,
    ) -> Float32Array:
        """Compute the rows of a batch, writing their K and V to their slots.

        T rows, S sequences, B blocks of the longest table, W words; KV position p of sequence s is slot
        block_tables[s, p // block_size] * block_size + p % block_size, and tree node j lives at KV position
        context_lens[s] + j.

        Args:
            kv: a cache of this decoder's shape.
            input_ids: int64[T].
            positions: int64[T], rotary positions.
            slot_mapping: int64[T], distinct: where each row's K and V go.
            block_tables: int32[S, B], padded with -1.
            context_lens: int32[S], committed KV positions.
            query_offsets: int32[S + 1]; the rows of sequence s are query_offsets[s]:query_offsets[s + 1].
            node_offsets: int32[S], tree node of the sequence's first row.
            ancestor_words: uint64[T, W]; bit j of word w is node 64 w + j, the row's own included.
            block_size: that of `kv`.
            logits_indices: int64[K], rows whose logits are wanted.

        Returns:
            float32[K, outputs of the head].

        Raises:
            ValueError: if an array has another shape or type, an index is out of range, or the decoder is closed.
                Nothing was written.
        """
        if not self._free.alive:
            raise ValueError("the decoder is closed")
        if kv._shape != self.shape:
            raise ValueError("the KV cache is of another shape than the decoder")
        batch = c.Batch()  # one per call: a second thread may fill its own meanwhile
        batch.num_rows, batch.num_sequences, batch.num_logits = len(input_ids), len(context_lens), len(logits_indices)
        batch.blocks_per_sequence, batch.words_per_row = block_tables.shape[-1], ancestor_words.shape[-1]
        batch.block_size = block_size
        rows, sequences = (len(input_ids),), (len(context_lens),)
        batch.input_ids = _address("input_ids", input_ids, np.int64, rows)
        batch.positions = _address("positions", positions, np.int64, rows)
        batch.slot_mapping = _address("slot_mapping", slot_mapping, np.int64, rows)
        batch.block_tables = _address("block_tables", block_tables, np.int32, sequences + block_tables.shape[-1:])
        batch.context_lens = _address("context_lens", context_lens, np.int32, sequences)
        batch.query_offsets = _address("query_offsets", query_offsets, np.int32, (sequences[0] + 1,))
        batch.node_offsets = _address("node_offsets", node_offsets, np.int32, sequences)
        batch.ancestor_words = _address("ancestor_words", ancestor_words, np.uint64, rows + ancestor_words.shape[-1:])
        batch.logits_indices = _address("logits_indices", logits_indices, np.int64, (len(logits_indices),))
        logits = np.empty((len(logits_indices), self._num_outputs), dtype=np.float32)
        library.check(self._forward(self._handle, kv._handle, batch, address(logits)))
        return logits

    def close(self) -> None:
        """End the threads and free the scratch memory. KV caches stay. Calling it again does nothing."""
        self._free()


def apply_linear(x: Float32Array, packed: PackedLinear, *, isa: str | None = None) -> Float32Array:
    """One linear layer alone, as the decoder computes it (one thread; for tests and measurements).

    Args:
        x: float32[T, K].
        packed: not interleaved.
        isa: one of `library.isas()`; the best by default.

    Returns:
        float32[T, N].
    """
    if packed.interleaved:
        raise ValueError("an interleaved layer computes silu(gate) * up, not a linear function")
    rows = np.ascontiguousarray(x, np.float32)
    if rows.ndim != 2 or rows.shape[1] != packed.num_inputs:
        raise ValueError(f"x has shape {rows.shape}; {packed.num_inputs} inputs are needed")
    y = np.empty((len(rows), packed.num_outputs), dtype=np.float32)
    linear = _linear("linear", packed, packed.num_outputs, packed.num_inputs)
    name = (isa or library.isas()[0]).encode()
    library.check(library.load().ts_linear_apply(linear, name, len(rows), address(rows), address(y)))
    return y


def _address(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> int:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)} instead of {np.dtype(dtype)}{list(shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return address(array)


def _shape(shape: DecoderShape, max_positions: int) -> c.Shape:
    return c.Shape(
        shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads,
        shape.num_kv_heads, shape.head_dim, max_positions, shape.rms_norm_eps,
    )  # fmt: skip


def _weights(shape: DecoderShape, weights: DecoderWeights) -> c.Weights:
    if len(weights.layers) != shape.num_layers:
        raise ValueError(f"{len(weights.layers)} layers instead of {shape.num_layers}")
    hidden, rotary = shape.hidden_size, (len(weights.rope_cos), shape.head_dim // 2)
    layers = (c.Layer * shape.num_layers)(*(_layer(shape, i, layer) for i, layer in enumerate(weights.layers)))
    return c.Weights(
        _address("embedding", weights.embedding, np.float32, (shape.vocab_size, hidden)),
        layers,
        _address("norm", weights.norm, np.float32, (hidden,)),
        _linear("head", weights.head, weights.head.num_outputs, hidden),
        _address("rope_cos", weights.rope_cos, np.float32, rotary),
        _address("rope_sin", weights.rope_sin, np.float32, rotary),
    )


def _layer(shape: DecoderShape, index: int, layer: LayerWeights) -> c.Layer:
    hidden, intermediate, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    attended = shape.num_heads * head_dim
    qkv = attended + 2 * shape.num_kv_heads * head_dim
    name = f"layer {index}'s"
    if not layer.gate_up.interleaved:
        raise ValueError(f"{name} gate_up is not interleaved")

    def norm(what: str, array: Float32Array | None, size: int) -> int | None:
        return None if array is None else _address(f"{name} {what}", array, np.float32, (size,))

    return c.Layer(
        norm("input_norm", layer.input_norm, hidden),
        _linear(f"{name} qkv", layer.qkv, qkv, hidden),
        norm("q_norm", layer.q_norm, head_dim),
        norm("k_norm", layer.k_norm, head_dim),
        _linear(f"{name} attention_output", layer.attention_output, hidden, attended),
        norm("feed_forward_norm", layer.feed_forward_norm, hidden),
        _linear(f"{name} gate_up", layer.gate_up, 2 * intermediate, hidden),
        _linear(f"{name} down", layer.down, hidden, intermediate),
    )


def _linear(name: str, packed: PackedLinear, outputs: int, inputs: int) -> c.Linear:
    if (packed.num_outputs, packed.num_inputs) != (outputs, inputs):
        raise ValueError(
            f"{name} has {packed.num_outputs} outputs and {packed.num_inputs} inputs instead of {outputs} and {inputs}"
        )
    per_panel = PANEL_OUTPUTS if not packed.interleaved else HALF_PANEL
    num_panels = -(-(outputs if not packed.interleaved else outputs // 2) // per_panel)
    steps = -(-inputs // GROUP_INPUTS) * (GROUP_INPUTS // STEP_INPUTS)
    places = (num_panels * PANEL_OUTPUTS,)
    panels = _address(f"{name} panels", packed.panels, np.uint8, (num_panels, steps, PANEL_OUTPUTS, STEP_INPUTS))
    if panels % ALIGNMENT:
        raise ValueError(f"{name} panels begin at no multiple of {ALIGNMENT} bytes")
    bias = None if packed.bias is None else _address(f"{name} bias", packed.bias, np.float32, places)
    scales = _address(f"{name} scales", packed.scales, np.float32, places)
    return c.Linear(panels, scales, bias, places[0] if packed.interleaved else outputs, inputs)
