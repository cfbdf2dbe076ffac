"""The sampler's exact arithmetic as Triton functions: the bits of `treeserve_kernels.noise`.

Kernels that call these are compiled without contraction of a * b + c (`enable_fp_fusion=False`), and use no library
logarithm or exponential. Division of doubles is correctly rounded on the device.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import math

import triton
import triton.language as tl

from treeserve_kernels.noise import MASS_BITS, signed

_GOLDEN = tl.constexpr(signed(0x9E3779B97F4A7C15))
_MIX_1 = tl.constexpr(signed(0xBF58476D1CE4E5B9))
_MIX_2 = tl.constexpr(signed(0x94D049BB133111EB))
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)
_LOG2_E = tl.constexpr(math.log2(math.e))
_MANTISSA = tl.constexpr((1 << 52) - 1)
_ONE_BITS = tl.constexpr(1023 << 52)
_SQRT2_MANTISSA = tl.constexpr(0x6A09E667F3BCD)
_MASS_EXPONENT = tl.constexpr(MASS_BITS + 1023)
_INVERSE_FACTORIALS = tl.constexpr(tuple(1.0 / math.factorial(k) for k in range(14)))


@triton.jit
def _shift_right(x, bits: tl.constexpr):
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _log(x):
    bits = x.to(tl.int64, bitcast=True)
    mantissa = bits & _MANTISSA
    halve = 1 + ((mantissa - _SQRT2_MANTISSA) >> 63)
    exponent = (_shift_right(bits, 52) - 1023 + halve).to(tl.float64)
    m = (mantissa + (_ONE_BITS - (halve << 52))).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (2.0 / 19.0) + 2.0 / 17.0
    for n in tl.static_range(15, 1, -2):
        p = p * z + 2.0 / n
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + (s * 2.0 + (s * z) * p))


@triton.jit
def gumbel(seed, position, ids):
    """Standard Gumbel noise of token ids at an output position, float64; seed and position are int64."""
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    bits = _mix(_mix((ids.to(tl.int64) + 1) * _GOLDEN ^ key))
    u = ((_shift_right(bits, 12) << 1) | 1).to(tl.float64) * (2.0**-53)
    return -_log(-_log(u))


@triton.jit
def mass(x):
    """exp(x) * 2^MASS_BITS of float64 x <= 0, rounded to int64."""
    x = tl.maximum(x, -64.0)
    n = (x * _LOG2_E - 0.5).to(tl.int64)
    whole = n.to(tl.float64)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = tl.zeros_like(r) + _INVERSE_FACTORIALS[13]
    for k in tl.static_range(12, -1, -1):
        p = p * r + _INVERSE_FACTORIALS[k]
    scale = ((n + _MASS_EXPONENT) << 52).to(tl.float64, bitcast=True)
    return (p * scale + 0.5).to(tl.int64)


@triton.jit
def order_key(values):
    """int64 in [0, 2^32) that orders float32 numbers as they are ordered; -0.0 equals 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
