"""The paged KV cache of the torch models: one tensor of keys and one of values per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.config import ModelConfig
from treeserve_kernels.dispatch import kernels_for


@dataclass(frozen=True)
class KvCache:
    """Keys and values by layer, [num_slots, KVH, D] each, in blocks of `block_size` slots.

    All numbers are finite from the start.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_size: int = 1

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device, block_size: int = 1
    ) -> Self:
        """A cache of zeros."""

        def tensors() -> tuple[torch.Tensor, ...]:
            shape = (num_slots, config.num_kv_heads, config.head_dim)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers))

        return cls(tensors(), tensors(), block_size)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(cache.nbytes for cache in (*self.keys, *self.values))

    @cached_property
    def block_nbytes(self) -> int:
        """Size of one block of every layer."""
        return sum(cache[: self.block_size].nbytes for cache in (*self.keys, *self.values))

    def move(self, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]) -> None:
        """Copy slots `src` to slots `dst` in every layer."""
        device = self.keys[0].device
        move_kv = kernels_for(device).move_kv
        sources, destinations = torch.from_numpy(src).to(device), torch.from_numpy(dst).to(device)
        for cache in (*self.keys, *self.values):
            move_kv(cache, sources, destinations)

    def save(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy a block of every layer to `data`, uint8[block_nbytes]."""
        self._host(data).copy_(torch.cat([part.reshape(-1).view(torch.uint8) for part in self._parts(block)]))

    def load(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy what `save` wrote into a block of this cache or one of the same shape."""
        on_device, start = self._host(data).to(self.keys[0].device), 0
        for part in self._parts(block):
            own = on_device[start : start + part.nbytes]
            part.copy_(own.view(part.dtype).view(part.shape))
            start += part.nbytes

    def _parts(self, block: int) -> Iterator[torch.Tensor]:
        """The block in every layer, [block_size, KVH, D] each."""
        start = block * self.block_size
        if not 0 <= start <= len(self.keys[0]) - self.block_size:
            raise ValueError(f"there is no block {block}")
        return (cache[start : start + self.block_size] for cache in (*self.keys, *self.values))

    def _host(self, data: npt.NDArray[np.uint8]) -> torch.Tensor:
        if data.shape != (self.block_nbytes,) or data.dtype != np.uint8:
            raise ValueError(f"{data.dtype}{list(data.shape)} instead of uint8[{self.block_nbytes}]")
        return torch.from_numpy(data)
