"""Looking through logits natively for the largest, and for the tokens that can win a draw."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from treeserve_kernels.cpu import library
from treeserve_kernels.cpu.arguments import array_address
from treeserve_kernels.cpu.packing import Float32Array

Int64Array = npt.NDArray[np.int64]

# Temperatures that `find_rivals` takes.
MIN_TEMPERATURE, MAX_TEMPERATURE = 2.0**-100, 2.0**100


def find_largest(values: Float32Array, num: int, *, isa: str | None = None) -> list[int] | None:
    """Indices of the largest values, the largest first, the lowest index first among equals.

    Args:
        values: float32[n], contiguous.
        num: how many, from 1 to n and 64.
        isa: one of `library.isas()`; the best by default.

    Returns:
        None if a value is NaN or infinite.

    Raises:
        ValueError: for arguments that are not so.
    """
    largest, all_finite = (ctypes.c_int64 * max(num, 0))(), ctypes.c_int32()
    where = array_address("values", values, np.float32, (values.size,))
    library.check(library.load().ts_find_largest(_name(isa), values.size, where, num, largest, all_finite))
    return list(largest) if all_finite.value else None


def find_rivals(
    values: Float32Array,
    ids: Int64Array | None,
    temperature: float,
    seed: int,
    position: int,
    *,
    isa: str | None = None,
) -> Int64Array:
    """Where the tokens are that can win the argmax of value / temperature + gumbel(seed, position, id).

    It decides between no two tokens that a last bit could: everything within 2^-10 of the best is there. So nearly
    always it is one token.

    Args:
        values: float32[n], contiguous, not empty. Some may be -inf, not all.
        ids: int64[n], contiguous, what the noise is drawn for; None for 0, 1, ...
        temperature: within [MIN_TEMPERATURE, MAX_TEMPERATURE].
        seed: [0, 2^64).
        position: absolute position of the token to draw.
        isa: one of `library.isas()`; the best by default.

    Returns:
        int64[at least 1], indices into `values`, ascending.

    Raises:
        ValueError: for arguments that are not so.
    """
    size = values.size
    rivals, count = np.empty(size, np.int64), ctypes.c_int64()
    library.check(
        library.load().ts_find_rivals(
            _name(isa),
            size,
            array_address("values", values, np.float32, (size,)),
            None if ids is None else array_address("ids", ids, np.int64, (size,)),
            temperature,
            seed,
            position,
            library.address(rivals),
            count,
        )
    )
    return rivals[: count.value].copy()


@cache
def _name(isa: str | None) -> bytes:
    return (isa or library.isas()[0]).encode()
