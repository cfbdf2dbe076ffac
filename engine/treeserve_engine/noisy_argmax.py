"""The argmax of logits with noise, by scoring the few tokens that can win it.

Which those are is looked up natively where the kernel library is built, and in numpy elsewhere. Both leave out only
tokens that cannot win, so the choice, and every bit that decides it, is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from treeserve_core.noise import GUMBEL_MIN, gumbel, uniform_counters
from treeserve_engine.native_sampling import native_sampling
from treeserve_engine.processors import FloatArray

DoubleArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]

_BLOCK = 16384
# exp(GUMBEL_MIN) has room for the rounding of exp and division: the true minimum is -3.604.
_CUT = math.exp(GUMBEL_MIN)


def noisy_argmax(values: FloatArray, kept: IdArray | None, temperature: float, seed: int, position: int) -> int:
    """The id in `kept` (None: all) with the largest value / T + gumbel(seed, position, id), the lowest one on ties.

    Args:
        values: float32[n], the logits of `kept`. Some may be -inf, not all.
        kept: int64[n], ascending.
        temperature: above 0.
        seed: [0, 2^64).
        position: absolute position of the token to choose.
    """
    rival = _rivals(values, kept, temperature, seed, position)
    if len(rival) > 1:
        noise = gumbel(seed, position, _ids(kept, rival))
        rival = rival[[np.argmax(scaled(values[rival], float(values.max()), temperature) + noise)]]
    return int(_ids(kept, rival)[0])


def find_rivals(values: FloatArray, kept: IdArray | None, temperature: float, seed: int, position: int) -> IdArray:
    """Indices, ascending, of the few dozen tokens that can win.

    With r = exp(value / T) / (1 - U), a token's score lies within [log r + GUMBEL_MIN, log r], because
    1 - U <= -log(U) <= (1 - U) exp(-GUMBEL_MIN). So a token whose r is below exp(GUMBEL_MIN) times that of another
    cannot win.

    Args: as for `noisy_argmax`.
    """
    best = float(values.max())
    leader = 2.0**-53  # of exp(0) / (2^53 - k), which the best token reaches whatever its noise
    rivals = []
    for start, block in blocks(values):
        ids = _ids(kept, np.arange(start, start + len(block)))
        ratios = weights(block, best, temperature) / (2.0**53 - uniform_counters(seed, position, ids))
        leader = max(leader, float(ratios.max()))
        rivals.append(start + np.flatnonzero(ratios >= leader * _CUT))
    return np.concatenate(rivals)


def blocks(values: FloatArray) -> Iterator[tuple[int, FloatArray]]:
    """Start and values of consecutive blocks.

    Larger temporaries go back to the system each time, and page faults cost more than the work.
    """
    return ((start, values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK))


def scaled(values: FloatArray, best: float, temperature: float) -> DoubleArray:
    """(values - best) / temperature: logits as the noise meets them; the shift makes it safe at any temperature."""
    shifted: DoubleArray = values - np.float64(best)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        shifted /= temperature
    return shifted


def weights(values: FloatArray, best: float, temperature: float) -> DoubleArray:
    """exp((values - best) / temperature): probabilities up to a factor."""
    exponents = scaled(values, best, temperature)
    return np.exp(exponents, out=exponents)


def _ids(kept: IdArray | None, indices: IdArray) -> IdArray:
    return indices if kept is None else kept[indices]


def _rivals(values: FloatArray, kept: IdArray | None, temperature: float, seed: int, position: int) -> IdArray:
    native = native_sampling()
    if native is None or not native.MIN_TEMPERATURE <= temperature <= native.MAX_TEMPERATURE:
        return find_rivals(values, kept, temperature, seed, position)
    rivals: IdArray = native.find_rivals(np.ascontiguousarray(values), kept, temperature, seed, position)
    return rivals
