"""Torch twin of `treeserve_core.noise.gumbel`: the same operators on tensors, the same bits, on any device."""

from __future__ import annotations

import torch

from treeserve_core.noise import log_of_split, split_float, uniform_counters


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of int64 token ids of any shape, as float64; see the numpy function."""
    u = uniform_counters(seed, position, token_ids).to(torch.float64) * 2.0**-53
    return -_exact_log(-_exact_log(u))


def _exact_log(x: torch.Tensor) -> torch.Tensor:
    exponent, m_bits = split_float(x.view(torch.int64))
    result: torch.Tensor = log_of_split(exponent.to(torch.float64), m_bits.view(torch.float64))
    return result
