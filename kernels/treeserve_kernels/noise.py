"""The sampler's exact arithmetic in plain torch: Gumbel noise and fixed-point weights, the same bits on any device.

Only integer operations and correctly rounded IEEE double operations in a fixed order. The noise has the bits of
`treeserve_core.noise.gumbel`, which the tests hold it to: kernels know nothing of the rest.
"""

from __future__ import annotations

import math

import torch

# Fractional bits of a mass: 2^20 tokens of at most 1 sum to at most 2^62.
MASS_BITS = 42

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_MANTISSA = (1 << 52) - 1
_ONE_BITS = 1023 << 52
_SQRT2_MANTISSA = 0x6A09E667F3BCD
_NEGLIGIBLE = -64.0  # its mass is 0 by far


def signed(x: int) -> int:
    """The 64-bit integer with the bits of x, as torch and Triton take it."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def gumbel(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of int64 token ids at an output position, float64.

    Args:
        seed: as a signed 64-bit integer.
    """
    counters = torch.tensor([seed, position + 1], dtype=torch.int64, device=ids.device)
    key = _mix(_mix(counters[:1] + signed(_GOLDEN)) + counters[1:] * signed(_GOLDEN))
    bits = _mix(_mix((ids + 1) * signed(_GOLDEN) ^ key))
    u = ((_shift_right(bits, 12) << 1) | 1).double() * 2.0**-53
    return -_log(-_log(u))


def mass(x: torch.Tensor) -> torch.Tensor:
    """exp(x) * 2^MASS_BITS of float64 x <= 0, rounded to int64: sums of it are exact in any order.

    Within 2^-52 of the exponential relatively, by its series to r^13, |r| <= log(2) / 2.
    """
    x = x.clamp(min=_NEGLIGIBLE)
    n = (x * math.log2(math.e) - 0.5).trunc()
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(k)
    scale = ((n.long() + (MASS_BITS + 1023)) << 52).view(torch.float64)
    return (p * scale + 0.5).long()


def order_key(values: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2^32) that orders float32 numbers as they are ordered; -0.0 equals 0.0."""
    bits = torch.where(values == 0.0, 0.0, values).view(torch.int32).long()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + (1 << 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser."""
    x = (x ^ _shift_right(x, 30)) * signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal doubles: 2 atanh((m - 1) / (m + 1)), series to s^19."""
    bits = x.view(torch.int64)
    mantissa = bits & _MANTISSA
    halve = 1 + ((mantissa - _SQRT2_MANTISSA) >> 63)
    exponent = (_shift_right(bits, 52) - 1023 + halve).double()
    m = (mantissa + (_ONE_BITS - (halve << 52))).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (2.0 / 19.0) + 2.0 / 17.0
    for n in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * z + 2.0 / n
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + (s * 2.0 + (s * z) * p))
