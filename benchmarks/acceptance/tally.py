"""Counts of replayed verify steps, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treeserve_core.tree import TokenTree


@dataclass
class Tally:
    """Running counts over verify steps of one kind of text.

    Attributes:
        steps: verify steps; the prefill, which brings the first token, is none.
        tokens: emitted by them.
        accepted: drafted tokens among those.
        drafted: nodes verified, roots not counted.
        rows: steps by the rows they took: root and nodes.
        tried_at_depth, accepted_at_depth: steps that reached the parent of a node at that depth and had a node there,
            and those that went on to one.
        tried_at_rank, accepted_at_rank: visited nodes with a child of that rank (0 for the one its sources rated best),
            and those whose child of that rank carried the token.
        accepted_of: accepted tokens that a source proposed; tokens of several sources count for each.
        accepted_of_one: those that it alone proposed.
        drafted_of: nodes that a source proposed, counted alike.
        draft_s: time in the drafter: commits and trees.
        source_s: the same by source, where measured.
    """

    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    tried_at_depth: Counter[int] = field(default_factory=Counter)
    accepted_at_depth: Counter[int] = field(default_factory=Counter)
    tried_at_rank: Counter[int] = field(default_factory=Counter)
    accepted_at_rank: Counter[int] = field(default_factory=Counter)
    accepted_of: Counter[str] = field(default_factory=Counter)
    accepted_of_one: Counter[str] = field(default_factory=Counter)
    drafted_of: Counter[str] = field(default_factory=Counter)
    draft_s: float = 0.0
    source_s: Counter[str] = field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step: accepted + 1, less only where an output ends inside a tree; 0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Nodes verified per step, the root not counted."""
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def draft_us(self) -> float:
        """Microseconds of drafting per step."""
        return 1e6 * self.draft_s / self.steps if self.steps else 0.0

    def record(self, tree: TokenTree, path: Sequence[int], emitted: int, source_names: Sequence[str]) -> None:
        """Count one step.

        Args:
            path: accepted nodes from the root's child down.
            emitted: tokens of the step.
            source_names: by bit of the nodes' masks.
        """
        self.steps += 1
        self.tokens += emitted
        self.accepted += len(path)
        self.drafted += len(tree) - 1
        self.rows[len(tree)] += 1
        for depth, (node, child) in enumerate(zip((0, *path), (*path, None), strict=True), start=1):
            ranked = _ranked_children(tree, node)
            if not ranked:
                break
            self.tried_at_depth[depth] += 1
            self.tried_at_rank.update(range(len(ranked)))
            if child is not None:
                self.accepted_at_depth[depth] += 1
                self.accepted_at_rank[ranked.index(child)] += 1
        for node in range(1, len(tree)):
            self.drafted_of.update(_sources(tree, node, source_names))
        for node in path:
            sources = _sources(tree, node, source_names)
            self.accepted_of.update(sources)
            if len(sources) == 1:
                self.accepted_of_one.update(sources)

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """The sum of several."""
        total = cls()
        for tally in tallies:
            for name, value in vars(tally).items():
                if isinstance(value, Counter):
                    getattr(total, name).update(value)
                else:
                    setattr(total, name, getattr(total, name) + value)
        return total


def _ranked_children(tree: TokenTree, node: int) -> list[int]:
    """A node's children, the one with the largest estimate first."""
    log_probs = tree.log_probs
    return list(tree.children[node]) if log_probs is None else sorted(tree.children[node], key=lambda c: -log_probs[c])


def _sources(tree: TokenTree, node: int, names: Sequence[str]) -> list[str]:
    mask = tree.source_masks[node] if tree.source_masks is not None else 0
    return [name for bit, name in enumerate(names) if mask >> bit & 1]
