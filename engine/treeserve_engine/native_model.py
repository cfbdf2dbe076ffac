"""A decoder of the Llama family on the native int8 kernels. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from treeserve_core.features import FeatureShape
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.config import ModelConfig
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.decoder import (
    BatchArrays,
    Decoder,
    DecoderShape,
    DecoderWeights,
    HiddenStates,
    KvCache,
)


class NativeModel:
    """Weights and the forward pass. Stateless between calls; the KV cache is the caller's.

    Exact by construction: a token's logits and KV have the same bits whatever is computed with it, on any instruction
    set and any number of threads.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, *, kv_dtype: str, threads: int, isa: str | None = None
    ) -> None:
        """Take weights that may be memory-mapped.

        Args:
            kv_dtype: "float32", "bfloat16" or "int8".
            threads: of a forward pass, the calling one included.
            isa: instruction set; by default the best that this CPU has.

        Raises:
            OSError: if the native library is not built.
        """
        self.config = config
        self._kv_dtype = kv_dtype
        self._decoder = Decoder(_decoder_shape(config), weights, threads=threads, isa=isa)

    def new_kv(self, num_blocks: int, block_size: int) -> KvCache:
        """An empty cache."""
        return self._decoder.new_kv(num_blocks, block_size, self._kv_dtype)

    def forward(self, batch: ForwardBatch, kv: KvCache) -> npt.NDArray[np.float32]:
        """Compute the rows of a batch, writing their K and V to their slots.

        Returns:
            Logits of the rows asked for, float32[K, outputs of the head].
        """
        return self._decoder.forward(kv, **_arrays(batch))

    def decode(
        self,
        kv: KvCache,
        block_tables: Sequence[Sequence[int]],
        sequences: Sequence[RunSequence],
        terms: RunTerms,
        choose: Choose,
    ) -> Ran:
        """See `RunModel.decode`."""
        return self._decoder.run(kv, block_tables, sequences, terms, choose)

    @property
    def feature_shape(self) -> FeatureShape:
        """What drafters are sent of it."""
        return FeatureShape.of_model(self.config.num_layers, self.config.hidden_size)

    def forward_hidden(self, batch: ForwardBatch, kv: KvCache, layers: Sequence[int]) -> HiddenStates:
        """See `HiddenModel.forward_hidden`."""
        feature_layers = np.array(layers, dtype=np.int64)
        return self._decoder.forward_hidden(kv, batch.feature_rows, feature_layers, **_arrays(batch))


def _arrays(batch: ForwardBatch) -> BatchArrays:
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "block_tables": batch.block_tables,
        "context_lens": batch.context_lens,
        "query_offsets": batch.query_offsets,
        "node_offsets": batch.node_offsets,
        "ancestor_words": batch.ancestor_words,
        "block_size": batch.block_size,
        "logits_indices": batch.logits_indices,
        "inputs": batch.inputs,
    }


def _decoder_shape(config: ModelConfig) -> DecoderShape:
    """The sizes that the native decoder asks for."""
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
    )
