"""What one speculator's trees are worth to one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeserve_core.tree import TokenTree

_SMOOTHING = 0.08  # the last dozen trees count most
_MOST_SAVED = 8.0  # beyond, a tree pays however slow its speculator is; more would only delay the end of a lucky run


@dataclass(eq=False)
class Pace:
    """Learns how many tokens a tree saves.

    A tree that arrives is followed, one at a time, along the tokens that the target commits after the tree's root.
    Nodes that are accepted save a token each, less what the tree cost (`spend`). Of a tree that came too late
    for a step, what it would have saved counts. What it saved in the end, at most 8, is averaged: what a sequence
    begins with counts as two trees, and the last dozen trees count most.

    That is what the next tree is expected to save; it pays if that is more than it costs (`Asking` knows).

    Attributes:
        saves: tokens that the next tree is expected to save.
        saved: tokens that the latest tree saved in the end.
        right: how many of its tokens came true that no quicker speculator's tree had.
        is_unknown: nothing was learned about this sequence yet.
    """

    saves: float
    saved: float = 0.0
    right: int = 0
    is_unknown: bool = True
    _trees: int = 2
    _followed: TokenTree | None = None
    _node: int = 0
    _saved: float = 0.0

    @property
    def follows(self) -> bool:
        """Whether a tree's end is not known yet."""
        return self._followed is not None

    def follow(self, tree: TokenTree) -> None:
        """Follow a tree that arrived, unless another is followed already."""
        if self._followed is None:
            self._followed, self._node, self._saved, self.right = tree, 0, 0.0, 0

    def hope(self, tokens: float) -> bool:
        """Something else than a tree says that the next one should save so many tokens; True if that is more."""
        if (tokens := min(tokens, _MOST_SAVED)) <= self.saves:
            return False
        self.saves, self.is_unknown = tokens, False
        self.doubt()
        return True

    def doubt(self) -> None:
        """What is known is old or unproved: the next tree counts as much as all before."""
        self._trees = 1

    def spend(self, tokens: float) -> None:
        """The followed tree cost as much as so many tokens: its nodes were verified, or a step was planned for it."""
        self._saved -= tokens

    def committed(self, token_ids: Sequence[int], each: float) -> bool:
        """Tokens were committed, and each in the followed tree saved that much of a token; True if they ended it."""
        tree = self._followed
        if tree is None:
            return False
        for token_id in token_ids:
            child = tree.child(self._node, token_id)
            if child is None:
                return self._end()
            self._node = child
            self._saved += each
            self.right += each > 0.0
        # At a leaf nothing more can come true.
        return not tree.children[self._node] and self._end()

    def learn(self, saved: float, right: int) -> None:
        """A tree that was not followed here saved that much in the end."""
        self._followed, self.right = None, right
        self._trees += 1
        self.saved = min(saved, _MOST_SAVED)
        self.saves += max(_SMOOTHING, 1.0 / self._trees) * (self.saved - self.saves)

    def _end(self) -> bool:
        self.learn(self._saved, self.right)
        return True
