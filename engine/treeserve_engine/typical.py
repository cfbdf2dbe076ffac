"""Typical acceptance after Medusa (Cai et al., 2024): lossy. Drafted tokens pass if they are probable enough.

Exactly: a path of the tree is accepted if its first token is the target's most probable one, and every later token x
either is that too or has p(x) > min(epsilon, delta * exp(-H(p))), where p is the target's distribution after the path
so far and H its entropy in nats. The longest accepted path wins; among equals the one that is most probable under the
target, then the one whose last node comes first. The token after it is the most probable one: at temperature 0 all of
this is argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from treeserve_core.acceptance import Acceptance
from treeserve_core.tree import TokenTree

DoubleArray = npt.NDArray[np.float64]


def longest_path(
    tree: TokenTree,
    distribution_of: Callable[[int, tuple[int, ...]], DoubleArray],
    ends: Callable[[int, int], bool],
    acceptance: Acceptance,
) -> tuple[int, ...]:
    """Tokens of the longest accepted path, the root's not among them.

    Args:
        distribution_of: the target's distribution at a node, after the tokens on the path to it: float64[vocab].
        ends: whether a token ends the generation, given how many tokens come before it in this step: nothing follows.
    """
    paths: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # accepted nodes: log-probability, tokens to there
    for node, (log_prob, path) in ((n, paths[n]) for n in range(len(tree)) if n in paths):
        if not tree.children[node] or (path and ends(path[-1], len(path) - 1)):
            continue
        p = distribution_of(node, path)
        accepted = is_accepted(p, acceptance, first=node == 0)
        for child in tree.children[node]:
            token_id = tree.token_ids[child]
            if accepted[token_id]:
                paths[child] = (log_prob + math.log(p[token_id]), (*path, token_id))
    return max(paths.items(), key=lambda item: (len(item[1][1]), item[1][0], -item[0]))[1][1]


def is_accepted(p: DoubleArray, acceptance: Acceptance, *, first: bool) -> npt.NDArray[np.bool_]:
    """For each token whether it is accepted where the target's distribution is p: bool[vocab].

    Args:
        first: it is the first token of the step.
    """
    accepted = np.zeros(len(p), dtype=np.bool_)
    if not first:
        positive = p[p > 0.0]
        entropy = -float((positive * np.log(positive)).sum())
        accepted = p > min(acceptance.epsilon, acceptance.delta * math.exp(-entropy))
    accepted[np.argmax(p)] = True
    return accepted
