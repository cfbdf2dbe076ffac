"""Multi-step speculative sampling at one node, after SpecInfer: the target's distribution, not its tokens.

Each drafted child x is tried with the distribution q it was drawn from: accepted with probability min(1, p(x) / q(x)),
else p becomes norm(max(0, p - q)); what is left of p in the end is sampled. The outcome follows p if the draws are
independent and each one that is tried was not chosen by its value. Children that were proposed outright count as drawn
from the distribution that knows nothing else, which is right whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from treeserve_core.draws import Draws

DoubleArray = npt.NDArray[np.float64]


def num_uniforms(draws: Draws | None, outright: Sequence[int]) -> int:
    """Uniforms that `choose` may need: one for each trial and one to sample what is left."""
    return (len(draws.token_ids) if draws is not None else 0) + len(outright) + 1


def choose(p: DoubleArray, draws: Draws | None, outright: Sequence[int], uniforms: Sequence[float]) -> int:
    """The token after a node.

    Draws are tried first, in draw order, a repeated one again: then whether another child was proposed outright, too,
    makes no difference to which of them are tried.

    Args:
        p: the target's distribution there, float64[vocab], left unchanged.
        draws: what was drawn below the node.
        outright: tokens of the children that were not drawn.
        uniforms: `num_uniforms` independent uniforms in [0, 1), drawn by nobody who had a part in the tree.
    """
    for (token_id, q_of_token, ids, q), u in zip(_trials(draws, outright), uniforms, strict=False):
        if u < min(1.0, p[token_id] / q_of_token):  # strict: a token of probability 0 is never accepted
            return token_id
        p = residual(p, ids, q)
    return sample(p, uniforms[-1])


def residual(p: DoubleArray, ids: npt.NDArray[np.int64], q: DoubleArray) -> DoubleArray:
    """norm(max(0, p - q)) with q given on `ids`; p itself if nothing is left, which only rounding can bring about."""
    left = p.copy()
    left[ids] = np.maximum(0.0, left[ids] - q)
    total = left.sum()
    return left / total if total > 0.0 else p


def sample(p: DoubleArray, u: float) -> int:
    """The token at u on the cumulative distribution of p; one of probability 0 never."""
    reached = np.cumsum(p)
    return int(np.searchsorted(reached, min(u * reached[-1], np.nextafter(reached[-1], 0.0)), side="right"))


def _trials(
    draws: Draws | None, outright: Sequence[int]
) -> Iterator[tuple[int, float, npt.NDArray[np.int64], DoubleArray]]:
    """Token, its probability in q, ids of q and q on them: one for each child to be tried, in order."""
    if draws is not None:
        q_of = dict(zip(draws.support, draws.probabilities.tolist(), strict=True))
        for token_id in draws.token_ids:
            yield token_id, q_of[token_id], draws.ids, draws.probabilities
    for token_id in outright:
        yield token_id, 1.0, np.array([token_id]), np.ones(1)
