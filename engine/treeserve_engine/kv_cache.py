"""The paged KV cache of the torch models: one tensor of keys and one of values per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.config import ModelConfig
from treeserve_kernels.dispatch import kernels_for


@dataclass(frozen=True)
class KvCache:
    """Keys and values by layer, [num_slots, KVH, D] each. All numbers are finite from the start."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(cls, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache of zeros."""

        def tensors() -> tuple[torch.Tensor, ...]:
            shape = (num_slots, config.num_kv_heads, config.head_dim)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers))

        return cls(tensors(), tensors())

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(cache.nbytes for cache in (*self.keys, *self.values))

    def move(self, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]) -> None:
        """Copy slots `src` to slots `dst` in every layer."""
        device = self.keys[0].device
        move_kv = kernels_for(device).move_kv
        sources, destinations = torch.from_numpy(src).to(device), torch.from_numpy(dst).to(device)
        for cache in (*self.keys, *self.values):
            move_kv(cache, sources, destinations)
