"""A sequence at one speculator: what that was told of it, and what is left of its newest tree."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from treeserve_core.tree import TokenTree
from treeserve_verifier.pacing import Pace
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import Speculator


@dataclass(eq=False)
class Seat:
    """A sequence at one speculator. The draft desk owns it; `pace`, `budget`, `eager` and `probed` are `Asking`'s.

    Attributes:
        told_len: committed tokens that the speculator knows of; 0 before the sequence is assigned.
        told_features: place of the token after the last one whose features it was sent.
        pace: what its trees are worth here.
        budget: nodes that a tree might have when that was last looked at; 0 where none may be asked for.
        eager: whether it is asked at every step.
        probed: whether it is asked after the next step, to find out what its trees are worth.
        asked_at: clock time of the latest ask; 0 before the first.
        top_token_ids: of the tokens that it was not told yet, from the first one on, if it wants them; empty for one
            that nobody looked at.
        known: of the tokens that it was not told yet, how many were in trees of quicker speculators.
        tree: what is left of its newest tree under the present root.
        tree_base: committed length for which that was drawn.
        offered: whether a step could use it.
        ran: whether the latest step was one of a run, which drafted by itself: no tree is at hand or asked for.
    """

    sequence: Sequence
    speculator: Speculator
    handle: int
    pace: Pace
    budget: int = 0
    eager: bool = False
    probed: bool = False
    asked_at: float = 0.0
    told_len: int = 0
    told_features: int = 0
    top_token_ids: list[SequenceOf[int]] = field(default_factory=list)
    known: int = 0
    tree: TokenTree | None = None
    tree_base: int = 0
    offered: bool = False
    ran: bool = False

    @property
    def waits(self) -> bool:
        """Whether a tree was asked for and did not come."""
        return self.handle in self.speculator.asked

    @property
    def asks(self) -> bool:
        """Whether it is to be asked after the next step."""
        return self.eager or self.probed

    @property
    def is_idle(self) -> bool:
        """Whether commits change nothing here: it is not asked, and no tree of it is at hand or judged."""
        return not (self.asks or self.waits or self.tree is not None or self.pace.follows)

    def note_top_tokens(self, base_len: int, top_token_ids: SequenceOf[SequenceOf[int]]) -> None:
        """Keep what the target held most probable for the tokens after `base_len`, which it was not told yet."""
        if self.told_len > 0 and top_token_ids:
            self.top_token_ids += [()] * (base_len - self.told_len - len(self.top_token_ids))
            self.top_token_ids += top_token_ids

    def take(self, tree: TokenTree, base: int) -> None:
        """A tree came that was drawn for `base` committed tokens; `tree` is what is left of it."""
        if base >= self.tree_base:  # else reordered: a newer tree is here already
            self.tree, self.tree_base, self.offered = _unless_empty(tree), base, False

    def forget_tree(self) -> None:
        """What is left of its tree is of no use any more."""
        self.tree, self.tree_base, self.offered = None, self.told_len, False

    def offer(self) -> TokenTree | None:
        """The tree for a step, its sources as the verifier numbers them; None without one."""
        if self.tree is None:
            return None
        self.offered = True
        bits = self.speculator.source_bits
        if self.tree.source_masks is None or bits == tuple(range(len(bits))):
            return self.tree
        return replace(self.tree, source_masks=tuple(_translate(mask, bits) for mask in self.tree.source_masks))

    def move_along(self, new: SequenceOf[int]) -> bool:
        """Re-root the tree along tokens that were committed. True if nothing is left of it and no step had it."""
        if self.tree is None:
            return False
        left = self.tree.rerooted(new)
        is_late = left is None and not self.offered
        self.tree = None if left is None else _unless_empty(left)
        self.offered = self.offered and self.tree is not None
        return is_late


def known_already(seats: SequenceOf[Seat], new: SequenceOf[int]) -> list[int]:
    """For each seat how many of the new tokens, from the first on, a quicker speculator's tree had."""
    if len(seats) < 2:
        return [0] * len(seats)
    had = [(seat.speculator.latency_s, _depth_along(seat.tree, new)) for seat in seats]
    return [max((depth for latency_s, depth in had if latency_s < own), default=0) for own, _ in had]


def _depth_along(tree: TokenTree | None, new: SequenceOf[int]) -> int:
    """How many of the tokens lie in a tree, from its root's children on."""
    node = 0
    for depth, token_id in enumerate(new):
        child = tree.child(node, token_id) if tree is not None else None
        if child is None:
            return depth
        node = child
    return len(new)


def _translate(mask: int, bits: SequenceOf[int]) -> int:
    return sum(1 << bit for k, bit in enumerate(bits) if mask >> k & 1)


def _unless_empty(tree: TokenTree) -> TokenTree | None:
    return tree if len(tree) > 1 else None
