"""Counter-based Gumbel noise: one function of (seed, position, token id), the same bits everywhere.

There is no generator state to move: the noise of a token depends on nothing but its own counter, so a token drawn
alone, in a tree, in any batch, by the drafter or after migration sees the same number. Every operation is exact integer
arithmetic or a correctly rounded IEEE double operation in a fixed order (no library logarithm, no fused multiply-add),
so the kernels' own versions in torch and Triton give the same bits; the tests hold them to it.

Integers are int64 throughout (wrapping), as there: torch has no full uint64 arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_MANTISSA = (1 << 52) - 1
_ONE_BITS = 1023 << 52
_SQRT2_MANTISSA = 0x6A09E667F3BCD

# Largest and smallest values `gumbel` can return: U lies in [2^-53, 1 - 2^-53].
GUMBEL_MAX = 36.8
GUMBEL_MIN = -3.61


def _signed(x: int) -> int:
    x &= _MASK_64
    return x - (1 << 64) if x >> 63 else x


def _mix_int(x: int) -> int:
    """SplitMix64's finaliser on a Python int (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    x &= _MASK_64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK_64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK_64
    return x ^ (x >> 31)


def _shift_right(x: Int64Array, bits: int) -> Int64Array:
    """Logical shift of int64 values."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int64Array) -> Int64Array:
    """SplitMix64's finaliser on int64 arrays."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _key(seed: int, position: int) -> int:
    """Key of one output position: a signed 64-bit integer."""
    return _signed(_mix_int(_mix_int(seed + _GOLDEN) + (position + 1) * _GOLDEN))


def uniform_counters(seed: int, position: int, token_ids: Int64Array) -> Int64Array:
    """Odd numerators k of U = k / 2^53 in (0, 1), for token ids."""
    bits = _mix(_mix((token_ids + 1) * _signed(_GOLDEN) ^ _key(seed, position)))
    return (_shift_right(bits, 12) << 1) | 1


def exact_log(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Natural logarithm of positive normal doubles, reproducible bit for bit on any IEEE machine.

    2 atanh((m - 1) / (m + 1)) for x = m * 2^e with m in [sqrt(1/2), sqrt(2)): series to s^19 in a fixed order.
    """
    bits = x.view(np.int64)
    mantissa = bits & _MANTISSA
    halve = 1 + ((mantissa - _SQRT2_MANTISSA) >> 63)  # 1 if the mantissa is at least sqrt(2)
    exponent = (_shift_right(bits, 52) - 1023 + halve).astype(np.float64)
    m = (mantissa + (_ONE_BITS - (halve << 52))).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (2.0 / 19.0) + 2.0 / 17.0
    for n in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * z + 2.0 / n
    result: npt.NDArray[np.float64] = exponent * _LN2_HIGH + (exponent * _LN2_LOW + (s * 2.0 + (s * z) * p))
    return result


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise -log(-log U) of each token id at an output position.

    Args:
        seed: the request's seed, [0, 2^64).
        position: absolute position of the token to draw (prompt and output), so prompt length shifts nothing else.
        token_ids: int64[n], any order, repeats allowed.

    Returns:
        float64[n], each within [GUMBEL_MIN, GUMBEL_MAX].
    """
    u = uniform_counters(seed, position, token_ids).astype(np.float64) * 2.0**-53
    return -exact_log(-exact_log(u))


def nearly_gumbel(seed: int, position: int, token_ids: Iterable[int]) -> list[float]:
    """`gumbel` to about 12 digits, for drafters: faster for fewer than some fifty token ids."""
    key = _key(seed, position) & _MASK_64
    bits = (_mix_int(_mix_int((token_id + 1) * _GOLDEN & _MASK_64 ^ key)) for token_id in token_ids)
    return [-math.log(-math.log((b >> 12 << 1 | 1) * 2.0**-53)) for b in bits]


class UniformStream(IntEnum):
    """Who draws: uniforms of different streams, and those behind the Gumbel noise, are independent."""

    VERIFIER = 1
    DRAFTER = 2


def uniforms(seed: int, position: int, stream: UniformStream, count: int) -> npt.NDArray[np.float64]:
    """The first `count` uniforms in (0, 1) of a stream at an output position: float64[count]."""
    counters = -(2 * np.arange(count, dtype=np.int64) + stream)  # below 0: no token id's noise
    return uniform_counters(seed, position, counters).astype(np.float64) * 2.0**-53
