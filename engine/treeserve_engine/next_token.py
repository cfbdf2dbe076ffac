"""The one sampler: `next_token` is a pure function of logits, parameters, context and position.

For temperature T > 0 it takes the argmax over the kept tokens of z / T + Gumbel(seed, position, id), which is an exact
draw from softmax(z / T). There is no generator state, so replaying it along a token tree is plain decoding, whatever
the tree, the batch or the machine that holds the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from treeserve_core.outcome import PositionLogProbs
from treeserve_core.sampling import SamplingParams
from treeserve_engine.largest import find_largest
from treeserve_engine.noisy_argmax import DoubleArray, IdArray, blocks, noisy_argmax, weights
from treeserve_engine.processors import BoolArray, FloatArray, TokenContext, processed_logits


class NonFiniteLogitsError(FloatingPointError):
    """The model gave NaN or infinite logits: there is nothing to draw from."""


def next_token(
    logits: FloatArray,
    params: SamplingParams,
    context: TokenContext,
    position: int,
    blocked_ids: Sequence[int] = (),
    allowed: BoolArray | None = None,
) -> int:
    """Choose the token at one output position.

    Order: penalties, logit bias, blocked ids and grammar (see `processed_logits`); at temperature 0 the argmax.
    Otherwise temperature, top-k, top-p over what top-k left, min-p relative to the most probable token, and the argmax
    of scaled logit plus noise. Ties always go to the lowest id, at the borders of the filters too.

    Args:
        logits: float32[vocab_size]. Every entry may be chosen: the caller cuts padding rows off. Left unchanged.
        params: how to choose.
        context: the tokens before this position.
        position: absolute position of the token to choose (prompt and output).
        blocked_ids: ids that must not be chosen here.
        allowed: bool[vocab_size], ids that a grammar allows here, at least one; None for all.

    Raises:
        NonFiniteLogitsError: if a logit is NaN or infinite.
    """
    most_probable = _checked_argmax(logits)
    processed = processed_logits(logits, params, context, blocked_ids, allowed)
    if params.is_greedy:
        return most_probable if processed is logits else int(processed.argmax())
    kept = _kept_ids(processed, params)
    values = processed if kept is None else processed[kept]
    return noisy_argmax(values, kept, params.temperature, params.seed, position)


def target_distribution(
    logits: FloatArray,
    params: SamplingParams,
    context: TokenContext,
    blocked_ids: Sequence[int] = (),
    allowed: BoolArray | None = None,
) -> DoubleArray:
    """The distribution that `next_token` draws from at temperature > 0: float64[vocab_size], 0 for what it filters.

    Args and raises: as for `next_token`.
    """
    _checked_argmax(logits)
    processed = processed_logits(logits, params, context, blocked_ids, allowed)
    kept = _kept_ids(processed, params)
    masses = weights(processed if kept is None else processed[kept], float(processed.max()), params.temperature)
    p = np.zeros(len(logits))
    p[slice(None) if kept is None else kept] = masses / masses.sum()
    return p


def position_log_probs(
    logits: FloatArray,
    params: SamplingParams,
    context: TokenContext,
    token_id: int,
    blocked_ids: Sequence[int] = (),
    allowed: BoolArray | None = None,
) -> PositionLogProbs:
    """Log-probability of a chosen token, and of the `params.top_log_probs` most probable ones, best first.

    They are the log-softmax of the logits after penalties, bias, blocked ids and grammar, at temperature 1 and before
    the filters: so greedy requests get meaningful numbers, and without processors they are the model's own. What may
    not be chosen is never among the top ones.

    Args: as for `next_token`; `token_id` is the token it returned.
    """
    processed = processed_logits(logits, params, context, blocked_ids, allowed)
    shifted = processed - np.float64(processed.max())
    log_normaliser = np.log(np.exp(shifted).sum())
    top = _largest(processed, min(params.top_log_probs or 0, len(processed)))
    top = top[np.argsort(-processed[top], kind="stable")]
    return PositionLogProbs(
        token_id,
        float(shifted[token_id] - log_normaliser),
        tuple((int(i), float(shifted[i] - log_normaliser)) for i in top if processed[i] > -np.inf),
    )


def _checked_argmax(logits: FloatArray) -> int:
    """The id of the largest logit. Raises NonFiniteLogitsError if one is NaN or infinite."""
    largest = find_largest(logits, 1)
    if largest is None:
        finite = np.isfinite(logits)
        first = int(np.argmin(finite))
        raise NonFiniteLogitsError(f"{finite.size - finite.sum()} logits are not finite; id {first}: {logits[first]}")
    return largest[0]


def _kept_ids(logits: FloatArray, params: SamplingParams) -> IdArray | None:
    """Ids that pass top-k, top-p and min-p, ascending; None if no filter is on."""
    kept: IdArray | None = None
    if 0 < params.top_k < len(logits):
        kept = _largest(logits, params.top_k)
    if params.top_p < 1.0:
        values = logits if kept is None else logits[kept]
        nucleus = _nucleus(values, params.temperature, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
    if params.min_p > 0.0:
        probable = logits >= np.float32(float(logits.max()) + params.temperature * math.log(params.min_p))
        kept = np.flatnonzero(probable) if kept is None else kept[probable[kept]]
    return kept


def _largest(values: FloatArray, k: int) -> IdArray:
    """Indices of the k largest values, ascending; the lowest indices of those tied at the border."""
    if k == 0:
        return np.empty(0, np.int64)
    return _first(values, k, np.partition(values, -k)[-k])


def _first(values: FloatArray, k: int, border: np.float32) -> IdArray:
    """Indices of the k largest values, given the smallest of these."""
    largest = values > border
    largest[np.flatnonzero(values == border)[: k - np.count_nonzero(largest)]] = True
    return np.flatnonzero(largest)


def _nucleus(values: FloatArray, temperature: float, top_p: float) -> IdArray:
    """Indices, ascending, of as many of the most probable tokens as it takes to reach top_p of their total probability.

    The one place where a choice rests on the library's exp: everything else that decides is correctly rounded IEEE.
    """
    best = float(values.max())
    total = sum(float(weights(block, best, temperature).sum()) for _, block in blocks(values))
    # Tokens with less than (1 - top_p) / n of the total make up less than 1 - top_p together, so the nucleus ends
    # above them: only the others need sorting. The halving covers the rounding.
    floor = best + temperature * math.log(0.5 * (1.0 - top_p) * total / len(values))
    pool = -np.sort(-values[np.flatnonzero(values >= np.float32(floor))])  # best first
    reached = np.cumsum(weights(pool, best, temperature)) >= top_p * total
    size = int(np.argmax(reached)) + 1 if reached.any() else len(pool)  # rounding may leave the sum just short
    return _first(values, size, pool[size - 1])
