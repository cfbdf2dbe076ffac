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
    """

    parent: int
    child: int | None


def visits(tree: TokenTree, new_tokens: Sequence[int]) -> list[Visit]:
    """The visited nodes, root first.

    The last one's children were all wrong, unless the tokens end first or a leaf was reached, which says nothing.
    """
    found: list[Visit] = []
    node = 0
    for token_id in new_tokens:
        if not tree.children[node]:
            break
        child = tree.child(node, token_id)
        found.append(Visit(node, child))
        if child is None:
            break
        node = child
    return found
