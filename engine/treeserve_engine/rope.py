"""Rotary position embeddings, half-split as in Llama checkpoints."""

from __future__ import annotations

import math

import torch

from treeserve_engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig


class RotaryTable:
    """Cosines and sines of every position, computed once: an entry has the same bits whoever reads it."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = positions[:, None] * _frequencies(config)
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors for `rotate` at int64[T] positions, float32[T, 1, D] each."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + D / 2]) of [T, heads, D] by their position's angles; float32."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos).add_(swapped * signed_sin)


def _frequencies(config: ModelConfig) -> torch.Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Stretch long wavelengths, keep short ones, interpolate between (see `Llama3RopeScaling`)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
