"""What one speculator's trees are worth to one sequence, and how often to ask for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeserve_core.tree import TokenTree

MAX_INTERVAL = 32
_SMOOTHING = 0.2  # the last five trees count most
_MOST_SAVED = 8.0  # beyond, a tree pays however slow its speculator is; more would only delay the end of a lucky run


@dataclass(eq=False)
class Pace:
    """Learns how many tokens a tree saves, and paces the asking by it.

    A tree that arrives is followed, one at a time, along the tokens that the target commits after the tree's root.
    Nodes that are accepted save a token each, less what the verified ones cost (`spend`). Of a tree that came too late
    for a step, what it would have saved counts. What it saved in the end, m, is smoothed:

        saves += 0.2 (min(m, 8) - saves)

    That is what the next tree is expected to save; it pays if that is more than it costs (`DraftDesk` knows). While
    trees pay, one is asked for at every step. Each one that ends when they do not doubles the tokens until the next
    ask, up to MAX_INTERVAL: so text that cannot be foreseen costs next to nothing, and the first tree that comes true
    brings every step's ask back.

    Attributes:
        saves: tokens that the next tree is expected to save.
        interval: committed tokens from one ask to the next.
    """

    saves: float
    interval: int = 1
    _followed: TokenTree | None = None
    _node: int = 0
    _saved: float = 0.0

    @property
    def eager(self) -> bool:
        """Whether a tree is wanted at every step."""
        return self.interval == 1

    def follow(self, tree: TokenTree) -> None:
        """Follow a tree that arrived, unless another is followed already."""
        if self._followed is None:
            self._followed, self._node, self._saved = tree, 0, 0.0

    def spend(self, tokens: float) -> None:
        """Nodes were verified that cost as much as so many tokens."""
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
        # At a leaf nothing more can come true.
        return not tree.children[self._node] and self._end()

    def adapt(self, pays: bool) -> None:
        """A tree ended, and at present trees pay or do not."""
        self.interval = 1 if pays else min(2 * self.interval, MAX_INTERVAL)

    def _end(self) -> bool:
        self.saves += _SMOOTHING * (min(self._saved, _MOST_SAVED) - self.saves)
        self._followed = None
        return True
