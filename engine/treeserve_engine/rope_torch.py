"""Rotary position embeddings in torch, half-split as in Llama checkpoints."""

from __future__ import annotations

import torch

from treeserve_engine.config import ModelConfig
from treeserve_engine.rope import RopeTable


class RotaryTable:
    """A model's `RopeTable` on a device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        table = RopeTable.of(config)
        self._cos = torch.from_numpy(table.cos).to(device)
        self._sin = torch.from_numpy(table.sin).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors for `rotate` at int64[T] positions, float32[T, 1, D] each."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + D / 2]) of [T, heads, D] by their position's angles; float32."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos).add_(swapped * signed_sin)
