"""The one sampler: `next_token` is a pure function of logits, parameters, context and position.

For temperature T > 0 it takes the argmax over the kept tokens of z / T + Gumbel(seed, position, id), which is an exact
draw from softmax(z / T). There is no generator state, so replaying it along a token tree is plain decoding, whatever
the tree, the batch or the machine that holds the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from treeserve_core.noise import GUMBEL_MIN, gumbel, uniform_counters
from treeserve_core.outcome import PositionLogProbs
from treeserve_core.sampling import SamplingParams
from treeserve_engine.processors import FloatArray, TokenContext, processed_logits

DoubleArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]

# Ids hashed at once. Larger temporaries go back to the system each time, and page faults cost more than the work.
_BLOCK = 16384
# exp(GUMBEL_MIN) has room for the rounding of exp and division: the true minimum is -3.604.
_CUT = math.exp(GUMBEL_MIN)


class NonFiniteLogitsError(FloatingPointError):
    """The model gave NaN or infinite logits: there is nothing to draw from."""


def next_token(
    logits: FloatArray,
    params: SamplingParams,
    context: TokenContext,
    position: int,
    blocked_ids: Sequence[int] = (),
) -> int:
    """Choose the token at one output position.

    Order: penalties, logit bias, blocked ids (see `processed_logits`); at temperature 0 the argmax. Otherwise
    temperature, top-k, top-p over what top-k left, min-p relative to the most probable token, and the argmax of scaled
    logit plus noise. Ties always go to the lowest id, at the borders of the filters too.

    Args:
        logits: float32[vocab_size]. Every entry may be chosen: the caller cuts padding rows off. Left unchanged.
        params: how to choose.
        context: the tokens before this position.
        position: absolute position of the token to choose (prompt and output).
        blocked_ids: ids that must not be chosen here.

    Raises:
        NonFiniteLogitsError: if a logit is NaN or infinite.
    """
    _check_finite(logits)
    processed = processed_logits(logits, params, context, blocked_ids)
    if params.is_greedy:
        return int(np.argmax(processed))
    kept = _kept_ids(processed, params)
    return _noisy_argmax(processed if kept is None else processed[kept], kept, params, position)


def target_distribution(
    logits: FloatArray, params: SamplingParams, context: TokenContext, blocked_ids: Sequence[int] = ()
) -> DoubleArray:
    """The distribution that `next_token` draws from at temperature > 0: float64[vocab_size], 0 for what it filters.

    Args and raises: as for `next_token`.
    """
    _check_finite(logits)
    processed = processed_logits(logits, params, context, blocked_ids)
    kept = _kept_ids(processed, params)
    weights = _weights(processed if kept is None else processed[kept], float(processed.max()), params.temperature)
    p = np.zeros(len(logits))
    p[slice(None) if kept is None else kept] = weights / weights.sum()
    return p


def position_log_probs(
    logits: FloatArray,
    params: SamplingParams,
    context: TokenContext,
    token_id: int,
    blocked_ids: Sequence[int] = (),
) -> PositionLogProbs:
    """Log-probability of a chosen token, and of the `params.top_log_probs` most probable ones, best first.

    They are the log-softmax of the logits after penalties, bias and blocked ids, at temperature 1 and before the
    filters: so greedy requests get meaningful numbers, and without processors they are the model's own. Blocked ids
    are never among the top ones.

    Args: as for `next_token`; `token_id` is the token it returned.
    """
    processed = processed_logits(logits, params, context, blocked_ids)
    shifted = processed - np.float64(processed.max())
    log_normaliser = np.log(np.exp(shifted).sum())
    top = _largest(processed, min(params.top_log_probs or 0, len(processed)))
    top = top[np.argsort(-processed[top], kind="stable")]
    return PositionLogProbs(
        token_id,
        float(shifted[token_id] - log_normaliser),
        tuple((int(i), float(shifted[i] - log_normaliser)) for i in top if processed[i] > -np.inf),
    )


def _check_finite(logits: FloatArray) -> None:
    """Raise NonFiniteLogitsError if a logit is NaN or infinite."""
    finite = np.isfinite(logits)
    if not finite.all():
        first = int(np.argmin(finite))
        raise NonFiniteLogitsError(f"{finite.size - finite.sum()} logits are not finite; id {first}: {logits[first]}")


def _kept_ids(logits: FloatArray, params: SamplingParams) -> IdArray | None:
    """Ids that pass top-k, top-p and min-p, ascending; None if no filter is on."""
    kept: IdArray | None = None
    if 0 < params.top_k < len(logits):
        kept = _largest(logits, params.top_k)
    if params.top_p < 1.0:
        values = logits if kept is None else logits[kept]
        nucleus = _largest(values, _nucleus_size(values, params.temperature, params.top_p))
        kept = nucleus if kept is None else kept[nucleus]
    if params.min_p > 0.0:
        probable = logits >= np.float32(float(logits.max()) + params.temperature * math.log(params.min_p))
        kept = np.flatnonzero(probable) if kept is None else kept[probable[kept]]
    return kept


def _largest(values: FloatArray, k: int) -> IdArray:
    """Indices of the k largest values, ascending; the lowest indices of those tied at the border."""
    if k == 0:
        return np.empty(0, np.int64)
    border = np.partition(values, -k)[-k]
    largest = values > border
    largest[np.flatnonzero(values == border)[: k - np.count_nonzero(largest)]] = True
    return np.flatnonzero(largest)


def _nucleus_size(values: FloatArray, temperature: float, top_p: float) -> int:
    """How many of the most probable tokens it takes to reach top_p of their total probability.

    The one place where a choice rests on the library's exp: everything else that decides is correctly rounded IEEE.
    """
    best = float(values.max())
    total = sum(float(_weights(block, best, temperature).sum()) for _, block in _blocks(values))
    # Tokens with less than (1 - top_p) / n of the total make up less than 1 - top_p together, so the nucleus ends
    # above them: only the others need sorting. The halving covers the rounding.
    floor = best + temperature * math.log(0.5 * (1.0 - top_p) * total / len(values))
    pool = -np.sort(-values[values >= np.float32(floor)])  # best first
    reached = np.cumsum(_weights(pool, best, temperature)) >= top_p * total
    return int(np.argmax(reached)) + 1 if reached.any() else len(pool)  # rounding may leave the sum just short


def _noisy_argmax(values: FloatArray, kept: IdArray | None, params: SamplingParams, position: int) -> int:
    """The id in `kept` (None: all) with the largest value / T + gumbel(seed, position, id), the lowest one on ties.

    Exact, but only a few dozen tokens pay for the logarithms of the noise. With r = exp(value / T) / (1 - U), a token's
    score lies within [log r + GUMBEL_MIN, log r], because 1 - U <= -log(U) <= (1 - U) exp(-GUMBEL_MIN). So a token
    whose r is below exp(GUMBEL_MIN) times that of another cannot win.

    Args:
        values: float32[n], the logits of `kept`.
    """
    best = float(values.max())
    leader = 2.0**-53  # of exp(0) / (2^53 - k), which the best token reaches whatever its noise
    rivals = []
    for start, block in _blocks(values):
        ids = _ids(kept, np.arange(start, start + len(block)))
        ratios = _weights(block, best, params.temperature) / (2.0**53 - uniform_counters(params.seed, position, ids))
        leader = max(leader, float(ratios.max()))
        rivals.append(start + np.flatnonzero(ratios >= leader * _CUT))
    rival = np.concatenate(rivals)
    scores = _scaled(values[rival], best, params.temperature) + gumbel(params.seed, position, _ids(kept, rival))
    return int(_ids(kept, rival)[np.argmax(scores)])


def _ids(kept: IdArray | None, indices: IdArray) -> IdArray:
    return indices if kept is None else kept[indices]


def _blocks(values: FloatArray) -> Iterator[tuple[int, FloatArray]]:
    """Start and values of consecutive blocks."""
    return ((start, values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK))


def _scaled(values: FloatArray, best: float, temperature: float) -> DoubleArray:
    """(values - best) / temperature: logits as the noise meets them; the shift makes it safe at any temperature."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        return (values - np.float64(best)) / temperature


def _weights(values: FloatArray, best: float, temperature: float) -> DoubleArray:
    return np.exp(_scaled(values, best, temperature))
