"""Growing a token tree level by level from a model's logits: which tokens to add, which nodes to expand next.

Dynamic expansion after EAGLE-2 (Li et al., 2024): a node's value is the probability of its path; the best nodes of a
level are expanded, and the best of all candidates make the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.draws import MAX_SUPPORT, Draws, draw_log_prob
from treeserve_core.noise import UniformStream, gumbel, uniforms
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree

# Coupled scores are taken over this many of the most probable tokens: noise for a whole vocabulary costs milliseconds.
_COUPLED_CANDIDATES = 1024

Vocabulary = npt.NDArray[np.int64]


def best_children(
    logits: npt.NDArray[np.float32],
    sampling: SamplingParams,
    position: int,
    count: int,
    vocabulary: Vocabulary | None = None,
) -> tuple[list[int], list[float]]:
    """The children of one node; see `children_of_level`.

    Args:
        logits: float32[N].
    """
    return children_of_level(logits[None], sampling, position, count, vocabulary)[0]


def children_of_level(
    logits: npt.NDArray[np.float32],
    sampling: SamplingParams,
    position: int,
    count: int,
    vocabulary: Vocabulary | None = None,
) -> list[tuple[list[int], list[float]]]:
    """The tokens most likely to be drawn at a position, best first (lowest id on ties), with log-probabilities.

    Greedy requests take the top of q. Others are coupled: the target draws with noise that is known here, so the top of
    log q + noise is what it would draw if it were this model, and the softmax of those scores says how surely.

    Args:
        logits: float32[nodes, N] without padding, of nodes of one level.
        position: absolute position of the token to draw: the length of the prefix before it.
        vocabulary: int64[N], ascending: the target's id of each output; None where they are the same.

    Returns:
        For each node the target's ids and their log-probabilities.
    """
    local = _top_ids(logits, count if sampling.is_greedy else max(count, _COUPLED_CANDIDATES))
    ids = local if vocabulary is None else vocabulary[local]
    top = np.take_along_axis(logits, local, 1).astype(np.float64)
    if sampling.is_greedy:
        scores, totals = top, _log_sum_exp(logits)
    else:
        scores = top / sampling.temperature + gumbel(sampling.seed, position, ids.ravel()).reshape(ids.shape)
        totals = _log_sum_exp(scores)
    children = []
    for row_ids, row_scores, total in zip(ids, scores, totals.tolist(), strict=True):
        order = np.lexsort((row_ids, -row_scores))[:count]
        children.append((row_ids[order].tolist(), np.minimum(row_scores[order] - total, 0.0).tolist()))
    return children


def draw_children(
    logits: npt.NDArray[np.float32],
    sampling: SamplingParams,
    position: int,
    count: int,
    vocabulary: Vocabulary | None = None,
) -> Draws:
    """`count` independent draws of the token at a position, from the most probable ones at the request's temperature.

    Nothing here may depend on the noise with which the target decides; the draws have a stream of their own.

    Args:
        logits: float32[N] without padding.
        position: absolute position of the token to draw.
        vocabulary: see `children_of_level`.
    """
    local = _top_ids(logits[None], MAX_SUPPORT)[0]
    ids = local if vocabulary is None else vocabulary[local]
    scores = logits[local].astype(np.float64) / sampling.temperature
    weights = np.exp(scores - scores.max())
    travelling = (weights / weights.sum()).astype(np.float32)  # as the verifier will see them
    ids, travelling = ids[travelling > 0.0], travelling[travelling > 0.0]
    reached = np.cumsum(travelling.astype(np.float64))
    u = uniforms(sampling.seed, position, UniformStream.DRAFTER, count)
    drawn = ids[np.searchsorted(reached, np.minimum(u * reached[-1], np.nextafter(reached[-1], 0.0)), side="right")]
    return Draws(tuple(drawn.tolist()), tuple(ids.tolist()), tuple(travelling.tolist()))


def _top_ids(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of the largest logits of each row, in any order: int64[rows, count]."""
    rows, outputs = logits.shape
    if count >= outputs:
        return np.broadcast_to(np.arange(outputs), (rows, outputs))
    return np.argpartition(logits, -count, axis=1)[:, -count:].astype(np.int64)


def _log_sum_exp(scores: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Of each row: float64[rows]."""
    highest = scores.max(1, keepdims=True)
    sums = np.exp(scores - highest).sum(1, dtype=np.float64)
    totals: npt.NDArray[np.float64] = highest[:, 0] + np.log(sums)
    return totals


@dataclass(frozen=True)
class GrowthLimits:
    """How far a tree grows.

    Attributes:
        max_nodes: nodes of the finished tree, the root not counted.
        max_depth: deepest node.
        width: nodes expanded per level.
        min_probability: least path probability of an expanded node.
        least_mass: least path probability of all expanded nodes of a level together.
    """

    max_nodes: int
    max_depth: int
    width: int
    min_probability: float
    least_mass: float = 0.0


class TreeGrowth:
    """All candidates of one tree while it grows. Node 0 is the root; parents precede their children."""

    def __init__(self, root_token: int, limits: GrowthLimits, eos_token_ids: frozenset[int]) -> None:
        self.token_ids = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self._log_probs = [0.0]
        self._path_log_probs = [0.0]
        self._draws: dict[int, Draws] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._level_start = 0

    def next_level(self) -> list[int]:
        """Nodes to expand next, ascending: the root first, then the best of the latest level; empty when grown.

        A node that is not among the best `max_nodes` by now has no descendant in the finished tree either.
        """
        level = range(self._level_start, len(self.token_ids))
        self._level_start = len(self.token_ids)
        if level.start == 0:
            return [0]
        ranked = sorted(range(1, len(self.token_ids)), key=lambda i: (-self._path_log_probs[i], self.depths[i], i))
        best = [i for i in ranked[: self._limits.max_nodes] if i in level and self._may_expand(i)]
        best = best[: self._limits.width]
        mass = sum(math.exp(self._path_log_probs[i]) for i in best)
        return sorted(best) if mass >= self._limits.least_mass else []

    def _may_expand(self, node: int) -> bool:
        return (
            self.depths[node] < self._limits.max_depth
            and self.token_ids[node] not in self._eos_token_ids
            and self._path_log_probs[node] >= math.log(self._limits.min_probability)
        )

    def expand(self, node: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add a node's children with their conditional log-probabilities."""
        for token_id, log_prob in zip(token_ids, log_probs, strict=True):
            self._children[node, token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self._log_probs.append(log_prob)
            self._path_log_probs.append(self._path_log_probs[node] + log_prob)

    def expand_by(self, node: int, draws: Draws) -> None:
        """Add what was drawn below a node. It is ranked by draw order alone: its tokens must not matter."""
        self._draws[node] = draws
        ranks = {token_id: rank for rank, token_id in reversed(list(enumerate(draws.token_ids)))}
        tokens = list(dict.fromkeys(draws.token_ids))
        self.expand(node, tokens, [draw_log_prob(ranks[token_id]) for token_id in tokens])

    def num_draws(self, node: int, most: int) -> int:
        """How many draws below a node are worth it: at least 1, whatever was drawn so far elsewhere."""
        least = math.log(self._limits.min_probability)
        worth = sum(self._path_log_probs[node] + draw_log_prob(rank) >= least for rank in range(most))
        return max(1, worth)

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that carries `token_id`, or None."""
        return self._children.get((node, token_id))

    def tree(self) -> TokenTree:
        """The best candidates as a tree."""
        draws = tuple(self._draws.get(node) for node in range(len(self.token_ids))) if self._draws else None
        everything = TokenTree(tuple(self.token_ids), tuple(self.parents), tuple(self._log_probs), draws=draws)
        return everything.pruned(self._limits.max_nodes)
