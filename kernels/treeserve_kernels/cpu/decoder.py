"""The native decoder: a whole forward pass over a ragged, paged batch in one call.

A row's logits and KV have the same bits whatever else is computed with it, on every instruction set, with any number
of threads, and wherever its KV lies.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from treeserve_kernels.cpu import library
from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.arguments import array_address, linear_of, shape_of, weights_of
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms, run_decode
from treeserve_kernels.cpu.library import address
from treeserve_kernels.cpu.packing import Float32Array, PackedLinear

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
        embedding: float32[V, H], or None if every forward pass brings its inputs.
        layers: from the first to the last.
        norm: float32[H], before the head.
        head: from H to V, or to the fewer tokens that a drafter can say.
        rope_cos: float32[P, D / 2].
        rope_sin: float32[P, D / 2].
    """

    embedding: Float32Array | None
    layers: Sequence[LayerWeights]
    norm: Float32Array
    head: PackedLinear
    rope_cos: Float32Array
    rope_sin: Float32Array


class BatchArrays(TypedDict):
    """One forward pass. T rows, S sequences, B blocks of the longest table, W words.

    KV position p of sequence s is slot block_tables[s, p // block_size] * block_size + p % block_size, and tree node j
    lives at KV position context_lens[s] + j.

    Attributes:
        input_ids: int64[T]; not looked at if there are inputs.
        positions: int64[T], rotary positions.
        slot_mapping: int64[T], distinct: where each row's K and V go.
        block_tables: int32[S, B], padded with -1.
        context_lens: int32[S], committed KV positions.
        query_offsets: int32[S + 1]; the rows of sequence s are query_offsets[s]:query_offsets[s + 1].
        node_offsets: int32[S], tree node of the sequence's first row.
        ancestor_words: uint64[T, W]; bit j of word w is node 64 w + j, the row's own included.
        block_size: that of the KV cache.
        logits_indices: int64[K], rows whose logits are wanted.
        inputs: float32[T, H], finite: what enters the first layer in place of the tokens' embeddings.
    """

    input_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int64Array
    block_tables: Int32Array
    context_lens: Int32Array
    query_offsets: Int32Array
    node_offsets: Int32Array
    ancestor_words: npt.NDArray[np.uint64]
    block_size: int
    logits_indices: Int64Array
    inputs: NotRequired[Float32Array | None]


@dataclass(frozen=True)
class HiddenStates:
    """What a forward pass over K wanted rows shows beside their logits.

    Attributes:
        logits: float32[K, outputs of the head].
        last: float32[K, H] after the last layer, before the final norm.
        features: float32[F, D, H], of F feature rows after D layers.
    """

    logits: Float32Array
    last: Float32Array
    features: Float32Array


class KvCache:
    """Keys and values of every layer by slot, in the decoder's own memory. All zeros at first."""

    def __init__(self, shape: DecoderShape, num_blocks: int, block_size: int, dtype: str) -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {dtype!r}; it is one of {', '.join(KV_DTYPES)}")
        self.block_size = block_size
        handle = ctypes.c_void_p()
        library.check(
            library.load().ts_kv_create(
                shape_of(shape, 1), num_blocks, block_size, KV_DTYPES.index(dtype), ctypes.byref(handle)
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

    @property
    def block_nbytes(self) -> int:
        """Size of one block of every layer."""
        size: int = library.load().ts_kv_block_nbytes(self._handle)
        return size

    def save(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy a block out of every layer.

        Args:
            data: uint8[block_nbytes], to be written.

        Raises:
            ValueError: if there is no such block, or `data` is of another shape or type.
        """
        target = array_address("data", data, np.uint8, (self.block_nbytes,))
        library.check(library.load().ts_kv_save(self._handle, block, target))

    def load(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy what `save` wrote into a block of this cache or one of the same shape. Raises as `save`."""
        source = array_address("data", data, np.uint8, (self.block_nbytes,))
        library.check(library.load().ts_kv_load(self._handle, block, source))


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
        packed = weights_of(shape, weights)
        handle = ctypes.c_void_p()
        created = library.load().ts_decoder_create(
            shape_of(shape, len(weights.rope_cos)), packed, threads, self.isa.encode(), ctypes.byref(handle)
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

    def forward(self, kv: KvCache, **batch: Unpack[BatchArrays]) -> Float32Array:
        """Compute the rows of a batch, writing their K and V to their slots.

        Args:
            kv: a cache of this decoder's shape.

        Returns:
            float32[K, outputs of the head].

        Raises:
            ValueError: if an array has another shape or type, an index is out of range, an input is not finite, or the
                decoder is closed. Nothing was written.
        """
        logits = np.empty((len(batch["logits_indices"]), self._num_outputs), dtype=np.float32)
        self._run(kv, self._batch(**batch), c.Outputs(address(logits), None, None))
        return logits

    def forward_hidden(
        self, kv: KvCache, feature_rows: Int64Array, feature_layers: Int64Array, **batch: Unpack[BatchArrays]
    ) -> HiddenStates:
        """`forward`, whose logits these are to the bit, with the hidden states behind them.

        Args:
            feature_rows: int64[F], rows whose hidden states are wanted.
            feature_layers: int64[D], after how many layers: ascending, each at least 1 and below the number of layers.

        Raises:
            ValueError: as `forward`.
        """
        arrays = self._batch(**batch)
        arrays.num_features, arrays.num_feature_layers = len(feature_rows), len(feature_layers)
        arrays.feature_rows = array_address("feature_rows", feature_rows, np.int64, (len(feature_rows),))
        arrays.feature_layers = array_address("feature_layers", feature_layers, np.int64, (len(feature_layers),))
        rows, hidden = len(batch["logits_indices"]), self.shape.hidden_size
        states = HiddenStates(
            logits=np.empty((rows, self._num_outputs), dtype=np.float32),
            last=np.empty((rows, hidden), dtype=np.float32),
            features=np.empty((len(feature_rows), len(feature_layers), hidden), dtype=np.float32),
        )
        self._run(kv, arrays, c.Outputs(address(states.logits), address(states.last), address(states.features)))
        return states

    def run(
        self,
        kv: KvCache,
        block_tables: Sequence[Sequence[int]],
        sequences: Sequence[RunSequence],
        terms: RunTerms,
        choose: Choose,
    ) -> Ran:
        """Decode steps in a row (`decode_run`), each of which writes K and V into the sequences' blocks.

        Args:
            kv: a cache of this decoder's shape.
            block_tables: KV blocks of each sequence, those reserved included.
            choose: chooses tokens where logits and noise do not do.

        Raises:
            ValueError: if the cache is of another shape, or the decoder is closed.
        """
        self._check_kv(kv)
        return run_decode(
            self._handle, kv._handle, self._num_outputs, kv.block_size, block_tables, sequences, terms, choose
        )

    def _batch(self, **batch: Unpack[BatchArrays]) -> c.Batch:
        input_ids, context_lens, logits_indices = batch["input_ids"], batch["context_lens"], batch["logits_indices"]
        block_tables, ancestor_words, inputs = batch["block_tables"], batch["ancestor_words"], batch.get("inputs")
        arrays = c.Batch()  # one per call: a second thread may fill its own meanwhile
        arrays.num_rows, arrays.num_sequences, arrays.num_logits = (
            len(input_ids),
            len(context_lens),
            len(logits_indices),
        )
        arrays.blocks_per_sequence, arrays.words_per_row = block_tables.shape[-1], ancestor_words.shape[-1]
        arrays.block_size = batch["block_size"]
        rows, sequences = (len(input_ids),), (len(context_lens),)
        arrays.input_ids = array_address("input_ids", input_ids, np.int64, rows)
        arrays.positions = array_address("positions", batch["positions"], np.int64, rows)
        arrays.slot_mapping = array_address("slot_mapping", batch["slot_mapping"], np.int64, rows)
        arrays.block_tables = array_address("block_tables", block_tables, np.int32, sequences + block_tables.shape[-1:])
        arrays.context_lens = array_address("context_lens", context_lens, np.int32, sequences)
        arrays.query_offsets = array_address("query_offsets", batch["query_offsets"], np.int32, (sequences[0] + 1,))
        arrays.node_offsets = array_address("node_offsets", batch["node_offsets"], np.int32, sequences)
        words_shape = rows + ancestor_words.shape[-1:]
        arrays.ancestor_words = array_address("ancestor_words", ancestor_words, np.uint64, words_shape)
        arrays.logits_indices = array_address("logits_indices", logits_indices, np.int64, (len(logits_indices),))
        if inputs is not None:
            arrays.inputs = array_address("inputs", inputs, np.float32, (*rows, self.shape.hidden_size))
        return arrays

    def _run(self, kv: KvCache, batch: c.Batch, outputs: c.Outputs) -> None:
        self._check_kv(kv)
        library.check(self._forward(self._handle, kv._handle, batch, outputs))

    def _check_kv(self, kv: KvCache) -> None:
        if not self._free.alive:
            raise ValueError("the decoder is closed")
        if kv._shape != self.shape:
            raise ValueError("the KV cache is of another shape than the decoder")

    def close(self) -> None:
        """End the threads and free the scratch memory. KV caches stay. Calling it again does nothing."""
        self._free()


def apply_linear(x: Float32Array, packed: PackedLinear, *, isa: str | None = None) -> Float32Array:
    """One linear layer alone, as the decoder computes it, in the calling thread.

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
    linear = linear_of("linear", packed, packed.num_outputs, packed.num_inputs)
    name = (isa or library.isas()[0]).encode()
    library.check(library.load().ts_linear_apply(linear, name, len(rows), address(rows), address(y)))
    return y
