"""Token trees: what a drafter proposes and a verifier checks in one pass."""

from __future__ import annotations

import math
import operator
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
        edges = set(zip(self.parents, self.token_ids, strict=True))
        ordered = all(map(operator.lt, self.parents, range(n))) and min(self.parents[1:], default=0) >= 0
        if not ordered or len(edges) < n:
            raise InvalidTreeError(self._fault())
        if self.log_probs is not None:
            if len(self.log_probs) != n:
                raise InvalidTreeError(f"{n} tokens but {len(self.log_probs)} log-probabilities")
            if not max(self.log_probs) <= 0.0 or math.isnan(sum(self.log_probs)):
                raise InvalidTreeError("log-probabilities must be numbers <= 0")
        if self.source_masks is not None and len(self.source_masks) != n:
            raise InvalidTreeError(f"{n} tokens but {len(self.source_masks)} source masks")
        if self.draws is not None:
            if len(self.draws) != n:
                raise InvalidTreeError(f"{n} tokens but draws for {len(self.draws)}")
            for i, draws in enumerate(self.draws):
                if draws is not None and any((i, token_id) not in edges for token_id in draws.token_ids):
                    raise InvalidTreeError(f"a token drawn below node {i} is not among its children")

    def _fault(self) -> str:
        """What is wrong with the first node that does not follow its parent or repeats a sibling."""
        seen: set[tuple[int, int]] = set()
        for i, edge in enumerate(zip(self.parents, self.token_ids, strict=True)):
            if i > 0 and not 0 <= edge[0] < i:
                return f"node {i} has parent {edge[0]}; parents precede their children"
            if edge in seen:
                return f"node {i} repeats token {edge[1]} of a sibling"
            seen.add(edge)
        raise AssertionError("the tree is sound")

    @classmethod
    def sound(
        cls,
        token_ids: tuple[int, ...],
        parents: tuple[int, ...],
        log_probs: tuple[float, ...] | None,
        source_masks: tuple[int, ...] | None = None,
        draws: tuple[Draws | None, ...] | None = None,
    ) -> TokenTree:
        """A tree whose parts were made such that every invariant holds: it is not checked."""
        tree = object.__new__(cls)
        tree.__dict__.update(
            token_ids=token_ids, parents=parents, log_probs=log_probs, source_masks=source_masks, draws=draws
        )
        return tree

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def root_only(cls, token_id: int) -> TokenTree:
        """The tree of plain decoding: nothing but the root."""
        if token_id < 0:
            raise InvalidTreeError("negative token id")
        return cls.sound((token_id,), (-1,), None)

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
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, ascending."""
        children: list[tuple[int, ...]] = [()] * len(self)
        for i, parent in enumerate(self.parents[1:], start=1):
            children[parent] += (i,)
        return tuple(children)

    @cached_property
    def path_log_probs(self) -> tuple[float, ...]:
        """Log-probability of the whole path to each node: zeros if the sources gave none.

        A drawn child counts with the guess for its draw's rank, whatever its token, and what was proposed outright
        beside draws with at most that of the last draw: so no draw makes room or takes it by its value.
        """
        path = [0.0]
        if self.draws is None and self.log_probs is not None:
            for parent, log_prob in zip(self.parents[1:], self.log_probs[1:], strict=True):
                path.append(path[parent] + log_prob)
            return tuple(path)
        for i in range(1, len(self)):
            log_prob = self.log_probs[i] if self.log_probs is not None else 0.0
            draws = self.draws_below(self.parents[i])
            if draws is not None:
                drawn = self.token_ids[i] in draws.token_ids
                last = draw_log_prob(len(draws.token_ids) - 1)
                log_prob = draw_log_prob(draws.token_ids.index(self.token_ids[i])) if drawn else min(log_prob, last)
            path.append(path[self.parents[i]] + log_prob)
        return tuple(path)

    @cached_property
    def ranking(self) -> tuple[tuple[float, int], ...]:
        """Path log-probability and node, in the order to prune from the end of: probable first, shallow first on ties.

        A node that was drawn several times is there for each of its draws. Any beginning of the ranking may be kept
        (`subtree`): parents come before children, draws in draw order and before what was proposed outright.
        """
        if self.draws is None:
            ranked = sorted(zip(map(operator.neg, self.path_log_probs), self.depths, range(len(self)), strict=True))
            return tuple((-negative, node) for negative, _, node in ranked if node > 0)
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
        for i in range(node + 1, len(self.token_ids)):
            if self.token_ids[i] == token_id and self.parents[i] == node:
                return i
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
        if n <= BITS_PER_WORD:  # numpy's calls cost more than such a tree
            masks = [1]
            for i in range(1, n):
                masks.append(masks[self.parents[i]] | 1 << i)
            return np.array(masks, dtype=np.uint64).reshape(n, 1)
        words = np.zeros((n, -(-n // BITS_PER_WORD)), dtype=np.uint64)
        for i in range(n):
            if i > 0:
                words[i] = words[self.parents[i]]
            words[i, i // BITS_PER_WORD] |= np.uint64(1 << (i % BITS_PER_WORD))
        return words

    def drafted_by(self, source_mask: int) -> TokenTree:
        """The tree with this source mask on all nodes but the root."""
        masks = (0, *[source_mask] * (len(self) - 1))
        return TokenTree.sound(self.token_ids, self.parents, self.log_probs, masks, self.draws)

    def subtree(self, nodes: Iterable[int], root: int = 0) -> TokenTree:
        """The tree of `nodes` under `root`. Parents of all nodes must be among them.

        Args:
            nodes: a node that was drawn several times, as often as its draws are kept (see `ranking`): the first draws
                of a node stay, as many as there are drawn children here.

        Raises:
            InvalidTreeError: if a node's parent is missing.
        """
        listed = list(nodes)
        kept = sorted({root, *listed})
        if len(kept) == len(self) and self.draws is None:
            return self
        index = {old: new for new, old in enumerate(kept)}
        below = kept[1:]
        for old in below:
            if self.parents[old] not in index:
                raise InvalidTreeError(f"node {old} was kept without its parent {self.parents[old]}")
        return TokenTree.sound(
            tuple([self.token_ids[i] for i in kept]),
            (-1, *[index[self.parents[i]] for i in below]),
            None if self.log_probs is None else (0.0, *[self.log_probs[i] for i in below]),
            None if self.source_masks is None else tuple([self.source_masks[i] for i in kept]),
            None if self.draws is None else self._kept_draws(kept, Counter(listed)),
        )

    def _kept_draws(self, kept: Sequence[int], given: Counter[int]) -> tuple[Draws | None, ...] | None:
        return _none_if_empty([self._first_draws(i, given) for i in kept])

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
        below.remove(node)
        if self.draws is None:
            return self.subtree(below, root=node)
        return self.subtree((i for _, i in self.ranking if i in below), root=node)


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
        merged = [0]
        masks[0] |= tree.source_masks[0] if tree.source_masks is not None else 0
        draws[0] = draws[0] or tree.draws_below(0)
        for i in range(1, len(tree)):
            key = (merged[tree.parents[i]], tree.token_ids[i])
            log_prob = tree.log_probs[i] if tree.log_probs is not None else 0.0
            mask = tree.source_masks[i] if tree.source_masks is not None else 0
            at = index.setdefault(key, len(token_ids))
            if at == len(token_ids):
                token_ids.append(key[1])
                parents.append(key[0])
                log_probs.append(log_prob)
                masks.append(mask)
                draws.append(tree.draws_below(i))
            else:
                log_probs[at] = max(log_probs[at], log_prob)
                masks[at] |= mask
                draws[at] = draws[at] or tree.draws_below(i)
            merged.append(at)
    return TokenTree.sound(
        tuple(token_ids),
        tuple(parents),
        tuple(log_probs) if with_log_probs else None,
        tuple(masks) if any(t.source_masks is not None for t in trees) else None,
        _none_if_empty(draws),
    )


def _none_if_empty(draws: Sequence[Draws | None]) -> tuple[Draws | None, ...] | None:
    return tuple(draws) if any(d is not None for d in draws) else None
