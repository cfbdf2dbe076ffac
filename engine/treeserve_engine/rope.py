"""Rotary position embeddings: the cosines and sines of every position, the same bits on every machine.

Both engines read this one table. Library sines differ in the last bit between processors, so they are evaluated here
by series in double precision, in a fixed order of correctly rounded operations, and rounded to float32 at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from treeserve_engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

# pi / 2 in two parts: the first has 33 bits, so that its product with a whole number below 2^20 is exact.
_HALF_PI_HIGH = 1.57079632673412561417
_HALF_PI_LOW = 6.07710050650619224932e-11
_CHUNK = 1 << 15  # angles evaluated at once: their intermediate values stay in the processor's cache


@dataclass(frozen=True)
class RopeTable:
    """Factors of every position. P = max_position_embeddings, D = head_dim.

    Attributes:
        cos: float32[P, D / 2]; entry [p, i] turns the pair (x[i], x[i + D / 2]) at position p.
        sin: like cos.
    """

    cos: Float32Array
    sin: Float32Array

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """The table of a model."""
        positions = np.arange(config.max_position_embeddings, dtype=np.float32)
        angles = positions[:, None] * _frequencies(config)  # rounded to float32, as in the models' own code
        cos, sin = np.empty_like(angles), np.empty_like(angles)
        rows = max(1, _CHUNK // angles.shape[1])
        for start in range(0, len(angles), rows):
            part = slice(start, start + rows)
            cos[part], sin[part] = _cos_sin(angles[part].astype(np.float64))
        return cls(cos, sin)


def _cos_sin(angles: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Cosine and sine of angles in [0, 2^20), each to about 1e-16."""
    turns = np.rint(angles * (2 / math.pi))
    r = (angles - turns * _HALF_PI_HIGH) - turns * _HALF_PI_LOW  # in [-pi/4, pi/4]
    z = r * r
    sin = r * _series(z, first_power=1)
    cos = _series(z, first_power=0)
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1).astype(np.bool_)
    return (
        np.where(odd, sin, cos) * np.where((quarter + 1) & 2, -1.0, 1.0),
        np.where(odd, cos, sin) * np.where(quarter & 2, -1.0, 1.0),
    )


def _series(z: Float64Array, first_power: int) -> Float64Array:
    """1 - z / ((p + 1)(p + 2)) + ... : the Taylor series of sin r / r (p = 1) or cos r (p = 0), z = r^2."""
    powers = range(first_power + 16, first_power, -2)
    total = np.full_like(z, 1.0 / math.factorial(powers[0]))
    for sign, power in zip((-1.0, 1.0) * len(powers), (*powers[1:], first_power), strict=False):
        total = total * z + sign / math.factorial(power)
    return total


def _frequencies(config: ModelConfig) -> Float32Array:
    """float32[D / 2], rounded where the models' own code rounds: 1 ulp here is a different angle far into a text.

    Powers are taken in double precision, so that rounding hides how a library computes them.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.array([config.rope_theta ** float(exponent) for exponent in exponents], dtype=np.float32)
    frequencies = np.float32(1) / powers
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / np.float32(scaling.factor)
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: Float32Array, scaling: Llama3RopeScaling) -> Float32Array:
    """Stretch long wavelengths, keep short ones, interpolate between (see `Llama3RopeScaling`)."""
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clip(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
