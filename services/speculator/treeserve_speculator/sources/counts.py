"""Growing a token tree from counts: how often each token followed the present context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol, Self

from treeserve_core.tree import TokenTree

_MIN_PATH_PROBABILITY = 0.1


class Context(Protocol):
    """A token string that occurred somewhere."""

    def followers(self) -> Sequence[tuple[int, int, Self]]:
        """Each token that followed, how often, and the string with that token at its end."""


class Grown(NamedTuple):
    """A tree that was grown, and its score: the sum of its nodes' path probabilities."""

    score: float
    token_ids: list[int]
    parents: list[int]
    log_probs: list[float]

    def tree(self) -> TokenTree | None:
        """None if it is nothing but a root."""
        if len(self.token_ids) == 1:
            return None
        return TokenTree.sound(tuple(self.token_ids), tuple(self.parents), tuple(self.log_probs))


def grow(context: Context, context_len: int, root_token: int, budget: int) -> Grown:
    """Best-first tree below a context, down to a path probability of 0.1.

    Args:
        context_len: tokens of the context, the root the last of them.
        budget: most nodes, the root not counted.
    """
    token_ids, parents, log_probs, score = [root_token], [-1], [0.0], 0.0
    # (-path probability, insertion order, parent, token, conditional probability, context, context length)
    heap: list[tuple[float, int, int, int, float, Context, int]] = []
    order = 0
    node, at, path_probability, length = context, 0, 1.0, context_len
    while True:
        for token_id, probability, child in _likely(node, length, _MIN_PATH_PROBABILITY / path_probability):
            order += 1
            heappush(heap, (-path_probability * probability, order, at, token_id, probability, child, length + 1))
        if not heap or len(token_ids) > budget:
            break
        negative, _, parent, token_id, probability, node, length = heappop(heap)
        path_probability = -negative
        score += path_probability
        at = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        log_probs.append(math.log(probability))
    return Grown(score, token_ids, parents, log_probs)


def _likely(node: Context, context_len: int, min_probability: float) -> list[tuple[int, float, Context]]:
    """Followers of at least `min_probability`, estimated from counts.

    Something new may follow too. As in Witten and Bell's estimate, it gets a share that grows with the number of
    distinct followers; the share shrinks with the length of the context, because long contexts predict better.
    """
    followers = node.followers()
    if len(followers) == 1:  # as for most contexts
        ((token_id, count, child),) = followers
        probability = count / (count + 1.0 / context_len)
        return [(token_id, probability, child)] if probability >= min_probability else []
    total = sum([count for _, count, _ in followers]) + len(followers) / context_len
    least = min_probability * total
    return [(token_id, count / total, child) for token_id, count, child in followers if count >= least]
