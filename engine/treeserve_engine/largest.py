"""Finding the largest logits: natively where the kernel library is built, in numpy elsewhere."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from treeserve_engine.native_sampling import native_sampling
from treeserve_engine.processors import FloatArray

_COLUMN = 64


def find_largest(logits: FloatArray, num: int) -> list[int] | None:
    """Ids of the `num` largest logits, the largest first, the lowest id first among equals; None if one is not finite.

    In numpy, of those equal to the last one any may be there, unless one alone is looked for.

    Args:
        logits: float32[n].
        num: from 1 to n and 64.
    """
    native = native_sampling()
    if native is not None:
        found: list[int] | None = native.find_largest(np.ascontiguousarray(logits), num)
        return found
    best = int(logits.argmax())  # of a NaN, if there is one; so is the smallest
    if not (math.isfinite(logits[best]) and math.isfinite(np.minimum.reduce(logits))):
        return None
    return [best] if num == 1 else _sorted_largest(logits, num)


def _sorted_largest(logits: FloatArray, num: int) -> list[int]:
    candidates = _columns_of_largest(logits, num)
    values = logits[candidates]
    largest = np.argpartition(values, -num)[-num:]
    order = np.lexsort((candidates[largest], -values[largest]))
    return [int(i) for i in candidates[largest[order]]]


def _columns_of_largest(logits: FloatArray, num: int) -> npt.NDArray[np.int64]:
    """Ids among which the largest logits are: cut into columns, they lie in those with the largest maxima.

    One pass over the vocabulary takes a third of the time of partitioning it.
    """
    width = len(logits) // _COLUMN
    if width <= num:
        return np.arange(len(logits))
    table = logits[: width * _COLUMN].reshape(_COLUMN, width)
    columns = np.argpartition(table.max(axis=0), -num)[-num:]
    inside = columns[:, None] + width * np.arange(_COLUMN)
    return np.concatenate([inside.ravel(), np.arange(width * _COLUMN, len(logits))])
