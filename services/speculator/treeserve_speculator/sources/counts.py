"""Growing a token tree from counts: how often each token followed the present context."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Protocol, Self

from treeserve_core.tree import TokenTree

_MIN_PATH_PROBABILITY = 0.1


class Context(Protocol):
    """A token string that occurred somewhere."""

    def followers(self) -> Iterable[tuple[int, int, Self]]:
        """Each token that followed, how often, and the string with that token at its end."""


def grow(context: Context, context_len: int, root_token: int, budget: int) -> tuple[float, TokenTree]:
    """Best-first tree below a context, down to a path probability of 0.1.

    Args:
        context_len: tokens of the context, the root the last of them.
        budget: most nodes, the root not counted.

    Returns:
        The tree's score, which is the sum of its nodes' path probabilities, and the tree.
    """
    token_ids, parents, log_probs, score = [root_token], [-1], [0.0], 0.0
    # (-path probability, insertion order, parent, token, conditional probability, context, context length)
    heap: list[tuple[float, int, int, int, float, Context, int]] = []
    order = 0
    node, at, path_probability, length = context, 0, 1.0, context_len
    while True:
        for token_id, probability, child in _likely(node, length, _MIN_PATH_PROBABILITY / path_probability):
            order += 1
            heapq.heappush(heap, (-path_probability * probability, order, at, token_id, probability, child, length + 1))
        if not heap or len(token_ids) > budget:
            break
        negative, _, parent, token_id, probability, node, length = heapq.heappop(heap)
        path_probability = -negative
        score += path_probability
        at = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        log_probs.append(math.log(probability))
    return score, TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))


def _likely(node: Context, context_len: int, min_probability: float) -> list[tuple[int, float, Context]]:
    """Followers of at least `min_probability`, estimated from counts.

    Something new may follow too. As in Witten and Bell's estimate, it gets a share that grows with the number of
    distinct followers; the share shrinks with the length of the context, because long contexts predict better.
    """
    followers = list(node.followers())
    total = sum(count for _, count, _ in followers) + len(followers) / context_len
    least = min_probability * total
    return [(token, count / total, child) for token, count, child in followers if count >= least]
