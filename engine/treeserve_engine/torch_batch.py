"""A forward batch as tensors on the device that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.batch import ForwardBatch
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

        def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            input_ids=tensor(batch.input_ids),
            positions=tensor(batch.positions),
            slot_mapping=tensor(batch.slot_mapping),
            attention=TreeAttentionMeta(
                block_tables=tensor(batch.block_tables),
                context_lens=tensor(batch.context_lens),
                query_offsets=tensor(batch.query_offsets),
                node_offsets=tensor(batch.node_offsets),
                ancestor_words=tensor(batch.ancestor_words.view(np.int64)),
                block_size=batch.block_size,
            ),
            logits_indices=tensor(batch.logits_indices),
        )
