"""A forward batch as tensors on the device that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.batch import ForwardBatch
from treeserve_engine.upload import upload
from treeserve_kernels.tree_attention import TreeAttentionMeta


@dataclass(frozen=True)
class TorchBatch:
    """The tensors of a `ForwardBatch`; see there for shapes."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: TreeAttentionMeta
    logits_indices: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, device: torch.device) -> Self:
        """Copy a batch to a device; on a CPU the arrays are shared."""
        arrays = arrays_of(batch)
        on_cpu = device.type == "cpu"
        tensors = tuple(map(torch.from_numpy, arrays)) if on_cpu else upload(arrays, device)
        return cls.from_tensors(tensors, batch.block_size)

    @classmethod
    def from_tensors(cls, tensors: Sequence[torch.Tensor], block_size: int) -> Self:
        """The tensors of `arrays_of`, in its order."""
        input_ids, positions, slot_mapping, logits_indices, tables, context_lens, query_offsets, nodes, words = tensors
        attention = TreeAttentionMeta(tables, context_lens, query_offsets, nodes, words, block_size)
        return cls(input_ids, positions, slot_mapping, attention, logits_indices)


def arrays_of(batch: ForwardBatch) -> tuple[npt.NDArray[Any], ...]:
    """What of a batch goes to the device; ancestor words as int64, because torch has no full uint64."""
    return (
        batch.input_ids,
        batch.positions,
        batch.slot_mapping,
        batch.logits_indices,
        batch.block_tables,
        batch.context_lens,
        batch.query_offsets,
        batch.node_offsets,
        batch.ancestor_words.view(np.int64),
    )
