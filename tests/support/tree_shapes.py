"""Trees for losslessness tests: some follow the true continuation, some are made to mislead."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from treeserve_core.tree import TokenTree

Shape = Callable[[int, Sequence[int], int, int, random.Random], TokenTree]


def chain(root: int, truth: Sequence[int], budget: int, vocab: int, rng: random.Random) -> TokenTree:
    """The true continuation as a chain, with a wrong token at a random place."""
    tokens = [root, *truth[:budget]]
    if len(tokens) > 1 and rng.random() < 0.7:
        tokens[rng.randrange(1, len(tokens))] = rng.randrange(vocab)
    return TokenTree.chain(tokens)


def star(root: int, truth: Sequence[int], budget: int, vocab: int, rng: random.Random) -> TokenTree:
    """All nodes are children of the root; the true token is among them, sometimes."""
    tokens = set(rng.sample(range(vocab), min(budget, vocab)))
    if truth and rng.random() < 0.7:
        tokens = {truth[0], *list(tokens)[: budget - 1]}
    children = sorted(tokens)
    rng.shuffle(children)
    return TokenTree((root, *children), (-1, *[0] * len(children)))


def comb(root: int, truth: Sequence[int], budget: int, vocab: int, rng: random.Random) -> TokenTree:
    """The true path with a wrong sibling before each of its nodes."""
    tokens, parents, spine = [root], [-1], 0
    for token in truth[: budget // 2]:
        wrong = (token + 1 + rng.randrange(vocab - 1)) % vocab
        tokens += [wrong, token]
        parents += [spine, spine]
        spine = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


def decoys(root: int, truth: Sequence[int], budget: int, vocab: int, rng: random.Random) -> TokenTree:
    """Wrong paths that rejoin the true tokens: the rejected word's continuation must not be kept."""
    tokens, parents = [root], [-1]
    wrong = (truth[0] + 1) % vocab if truth else 0
    for head in (wrong, *truth[:1]):
        parent = 0
        for token in (head, *truth[1 : budget // 2]):
            if len(tokens) > budget:
                break
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


def scatter(root: int, truth: Sequence[int], budget: int, vocab: int, rng: random.Random) -> TokenTree:
    """A random tree with random tokens; where it can, it hides the true path in it."""
    tokens, parents = [root], [-1]
    taken: set[tuple[int, int]] = set()
    spine, depth = 0, 0
    while len(tokens) <= budget:
        if depth < len(truth) and rng.random() < 0.5:
            parent, token = spine, truth[depth]
        else:
            parent, token = rng.randrange(len(tokens)), rng.randrange(vocab)
        if (parent, token) in taken:
            if parent == spine and depth < len(truth) and token == truth[depth]:
                depth = len(truth)  # a random node took the place already
            continue
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        if parent == spine and depth < len(truth) and token == truth[depth]:
            spine, depth = len(tokens) - 1, depth + 1
    return TokenTree(tuple(tokens), tuple(parents))


def misleading(root: int, truth: Sequence[int], budget: int, vocab: int, rng: random.Random) -> TokenTree:
    """A full binary tree of nothing but wrong tokens."""
    tokens, parents = [root], [-1]
    for i in range(1, budget + 1):
        parent = (i - 1) // 2
        token = rng.randrange(vocab)
        while (truth and token == truth[0]) or (i % 2 == 0 and token == tokens[-1]):
            token = rng.randrange(vocab)
        tokens.append(token)
        parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


SHAPES: dict[str, Shape] = {
    "chain": chain,
    "star": star,
    "comb": comb,
    "decoys": decoys,
    "scatter": scatter,
    "misleading": misleading,
}
