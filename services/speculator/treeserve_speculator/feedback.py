"""What became of a drafted tree: follows it along the tokens that were committed after its root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeserve_core.tree import TokenTree


@dataclass(frozen=True)
class Visit:
    """A node on the committed path that has children, and which of them was right.

    Attributes:
        parent: the node.
        child: its child that carries the next committed token; None if none does.
        depth: of its children; 1 below the root.
    """

    parent: int
    child: int | None
    depth: int

    def rank(self, tree: TokenTree) -> int | None:
        """Place of the right child among its siblings in the source's order, from 0."""
        return None if self.child is None else tree.children[self.parent].index(self.child)


def visits(tree: TokenTree, new_tokens: Sequence[int]) -> list[Visit]:
    """The visited nodes, root first.

    The last one's children were all wrong, unless the tokens end first or a leaf was reached, which says nothing.
    """
    found: list[Visit] = []
    node = 0
    for depth, token_id in enumerate(new_tokens, start=1):
        if not tree.children[node]:
            break
        child = tree.child(node, token_id)
        found.append(Visit(node, child, depth))
        if child is None:
            break
        node = child
    return found
