"""Token trees: what a drafter proposes and a verifier checks in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from treeserve_core.draws import Draws, draw_log_prob
from treeserve_core.errors import InvalidTreeError

BITS_PER_WORD = 64


@dataclass(frozen=True)
class TokenTree:
    """An immutable tree of candidate tokens.

    Node 0 is the root: the last committed token, whose KV the target has not computed yet. Parents precede their
    children (``parents[0] == -1``, ``parents[i] < i``) and siblings carry distinct tokens.

    Attributes:
        token_ids: one id per node, each >= 0.
        parents: index of each node's parent.
        log_probs: natural log of each node's conditional probability given its parent, as its source sees it, each
            <= 0 (the root's is 0 by convention); None if the sources gave none.
        source_masks: bit k set on a node if source k proposed it; None if unknown.
        draws: for each node what was drawn below it, or None. Each drawn token is a child; a child that was not drawn
            was proposed outright. None if nothing was drawn.

    Raises:
        InvalidTreeError: if an invariant does not hold.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    source_masks: tuple[int, ...] | None = None
    draws: tuple[Draws | None, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if n == 0:
            raise InvalidTreeError("a tree has at least a root")
        if len(self.parents) != n:
            raise InvalidTreeError(f"{n} tokens but {len(self.parents)} parents")
        if self.parents[0] != -1:
            raise InvalidTreeError(f"the root's parent must be -1, not {self.parents[0]}")
        if min(self.token_ids) < 0:
            raise InvalidTreeError("negative token id")
        seen: set[tuple[int, int]] = set()
        for i in range(1, n):
            parent = self.parents[i]
            if not 0 <= parent < i:
                raise InvalidTreeError(f"node {i} has parent {parent}; parents precede their children")
            if (parent, self.token_ids[i]) in seen:
                raise InvalidTreeError(f"node {i} repeats token {self.token_ids[i]} of a sibling")
            seen.add((parent, self.token_ids[i]))
        if self.log_probs is not None:
            if len(self.log_probs) != n:
                raise InvalidTreeError(f"{n} tokens but {len(self.log_probs)} log-probabilities")
            if not all(lp <= 0.0 for lp in self.log_probs):  # also catches NaN
                raise InvalidTreeError("log-probabilities must be numbers <= 0")
        if self.source_masks is not None and len(self.source_masks) != n:
            raise InvalidTreeError(f"{n} tokens but {len(self.source_masks)} source masks")
        if self.draws is not None:
            if len(self.draws) != n:
                raise InvalidTreeError(f"{n} tokens but draws for {len(self.draws)}")
            for i, draws in enumerate(self.draws):
                if draws is not None and any((i, token_id) not in seen for token_id in draws.token_ids):
                    raise InvalidTreeError(f"a token drawn below node {i} is not among its children")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def root_only(cls, token_id: int) -> TokenTree:
        """The tree of plain decoding: nothing but the root."""
        return cls((token_id,), (-1,))

    @classmethod
    def chain(cls, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> TokenTree:
        """A tree without branches; `token_ids[0]` is the root."""
        return cls(
            tuple(token_ids),
            tuple(range(-1, len(token_ids) - 1)),
            None if log_probs is None else tuple(log_probs),
        )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; its position is root position + depth."""
        depths = [0] * len(self)
        for i in range(1, len(self)):
            depths[i] = depths[self.parents[i]] + 1
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, ascending."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for i in range(1, len(self)):
            children[self.parents[i]].append(i)
        return tuple(map(tuple, children))

    @cached_property
    def path_log_probs(self) -> tuple[float, ...]:
        """Log-probability of the whole path to each node: zeros if the sources gave none.

        A drawn child counts with the guess for its draw's rank, whatever its token, and what was proposed outright
        beside draws with at most that of the last draw: so no draw makes room or takes it by its value.
        """
        path = [0.0] * len(self)
        for i in range(1, len(self)):
            log_prob = self.log_probs[i] if self.log_probs is not None else 0.0
            draws = self.draws_below(self.parents[i])
            if draws is not None:
                drawn = self.token_ids[i] in draws.token_ids
                last = draw_log_prob(len(draws.token_ids) - 1)
                log_prob = draw_log_prob(draws.token_ids.index(self.token_ids[i])) if drawn else min(log_prob, last)
            path[i] = path[self.parents[i]] + log_prob
        return tuple(path)

    @cached_property
    def ranking(self) -> tuple[tuple[float, int], ...]:
        """Path log-probability and node, in the order to prune from the end of: probable first, shallow first on ties.

        A node that was drawn several times is there for each of its draws. Any beginning of the ranking may be kept
        (`subtree`): parents come before children, draws in draw order and before what was proposed outright.
        """
        entries: list[tuple[float, int, int, int]] = []  # -path log-probability, depth, order, node
        for i in range(1, len(self)):
            draws = self.draws_below(self.parents[i])
            if draws is None or self.token_ids[i] not in draws.token_ids:
                entries.append((-self.path_log_probs[i], self.depths[i], i if draws is None else len(self) + i, i))
                continue
            above = self.path_log_probs[self.parents[i]]
            for rank, token_id in enumerate(draws.token_ids):
                if token_id == self.token_ids[i]:
                    entries.append((-above - draw_log_prob(rank), self.depths[i], i, i))
        return tuple((-negative, node) for negative, _, _, node in sorted(entries))

    @property
    def repeated_draws(self) -> int:
        """How many draws brought a token that was drawn below the same node already."""
        return sum(len(d.token_ids) - len(set(d.token_ids)) for d in self.draws or () if d is not None)

    def draws_below(self, node: int) -> Draws | None:
        """What was drawn for the children of `node`; None if its children were proposed outright."""
        return None if self.draws is None else self.draws[node]

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that carries `token_id`, or None."""
        for c in self.children[node]:
            if self.token_ids[c] == token_id:
                return c
        return None

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`; empty for the root."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def ancestor_words(self) -> npt.NDArray[np.uint64]:
        """Ancestor bitmask of each node, itself included: uint64[n, ceil(n / 64)], bit j of word w is node 64 w + j."""
        n = len(self)
        words = np.zeros((n, -(-n // BITS_PER_WORD)), dtype=np.uint64)
        for i in range(n):
            if i > 0:
                words[i] = words[self.parents[i]]
            words[i, i // BITS_PER_WORD] |= np.uint64(1 << (i % BITS_PER_WORD))
        return words

    def subtree(self, nodes: Iterable[int], root: int = 0) -> TokenTree:
        """The tree of `nodes` under `root`. Parents of all nodes must be among them.

        Args:
            nodes: a node that was drawn several times, as often as its draws are kept (see `ranking`): the first draws
                of a node stay, as many as there are drawn children here.

        Raises:
            InvalidTreeError: if a node's parent is missing.
        """
        given = Counter(nodes)
        kept = sorted({root, *given})
        index = {old: new for new, old in enumerate(kept)}
        parents = [-1]
        for old in kept[1:]:
            if self.parents[old] not in index:
                raise InvalidTreeError(f"node {old} was kept without its parent {self.parents[old]}")
            parents.append(index[self.parents[old]])
        return TokenTree(
            tuple(self.token_ids[i] for i in kept),
            tuple(parents),
            None if self.log_probs is None else (0.0, *(self.log_probs[i] for i in kept[1:])),
            None if self.source_masks is None else tuple(self.source_masks[i] for i in kept),
            None if self.draws is None else _none_if_empty([self._first_draws(i, given) for i in kept]),
        )

    def _first_draws(self, node: int, given: Counter[int]) -> Draws | None:
        """The node's draws that stay if children are kept as often as `given`."""
        draws = self.draws_below(node)
        if draws is None:
            return None
        return draws.first(sum(given[c] for c in self.children[node] if self.token_ids[c] in draws.token_ids))

    def pruned(self, max_nodes: int, max_depth: int | None = None) -> TokenTree:
        """The first `max_nodes` of the ranking, besides the root; a draw that repeats a token counts as a node."""
        nodes = [i for _, i in self.ranking if max_depth is None or self.depths[i] <= max_depth]
        if len(nodes) == len(self.ranking) and len(nodes) <= max_nodes:
            return self
        return self.subtree(nodes[:max_nodes])

    def rerooted(self, token_ids: Sequence[int]) -> TokenTree | None:
        """The subtree below the path `token_ids` (tokens committed after the root); None if the path is not there."""
        node = 0
        for token_id in token_ids:
            child = self.child(node, token_id)
            if child is None:
                return None
            node = child
        if node == 0:
            return self
        below = {node}
        for i in range(node + 1, len(self)):
            if self.parents[i] in below:
                below.add(i)
        return self.subtree((i for _, i in self.ranking if i in below and i != node), root=node)


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Union of trees over the same root, keyed by path (never by token and depth).

    A node proposed by several sources remembers all of them and keeps the larger probability. Log-probabilities
    survive only if every tree has them. Where several trees drew below the same node, the first one's draws count;
    what the others drew counts as proposed outright, which is as unbiased.

    Raises:
        InvalidTreeError: if there is no tree or the roots differ.
    """
    if not trees:
        raise InvalidTreeError("nothing to merge")
    if len(trees) == 1:
        return trees[0]
    if len({t.token_ids[0] for t in trees}) != 1:
        raise InvalidTreeError("trees over different roots cannot be merged")
    with_log_probs = all(t.log_probs is not None for t in trees)
    token_ids, parents, log_probs, masks = [trees[0].token_ids[0]], [-1], [0.0], [0]
    draws: list[Draws | None] = [None]
    index: dict[tuple[int, int], int] = {}
    for tree in trees:
        merged = [0] * len(tree)
        for i in range(len(tree)):
            log_prob = tree.log_probs[i] if tree.log_probs is not None else 0.0
            mask = tree.source_masks[i] if tree.source_masks is not None else 0
            if i > 0:
                key = (merged[tree.parents[i]], tree.token_ids[i])
                if key not in index:
                    index[key] = len(token_ids)
                    token_ids.append(tree.token_ids[i])
                    parents.append(key[0])
                    log_probs.append(log_prob)
                    masks.append(0)
                    draws.append(None)
                merged[i] = index[key]
                log_probs[merged[i]] = max(log_probs[merged[i]], log_prob)
            masks[merged[i]] |= mask
            draws[merged[i]] = draws[merged[i]] or tree.draws_below(i)
    return TokenTree(
        tuple(token_ids),
        tuple(parents),
        tuple(log_probs) if with_log_probs else None,
        tuple(masks) if any(t.source_masks is not None for t in trees) else None,
        _none_if_empty(draws),
    )


def _none_if_empty(draws: Sequence[Draws | None]) -> tuple[Draws | None, ...] | None:
    return tuple(draws) if any(d is not None for d in draws) else None
