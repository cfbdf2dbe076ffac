"""Following a drafted tree along what was committed."""

from __future__ import annotations

from treeserve_core.tree import TokenTree
from treeserve_speculator.feedback import Visit, visits

#        9
#      /   \
#     1     2
#    / \    |
#   3   4   5
TREE = TokenTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2))


def test_each_node_on_the_path_is_visited_until_no_child_is_right() -> None:
    assert visits(TREE, [1, 4, 7]) == [Visit(0, 1), Visit(1, 4)], "below a leaf nobody guessed"
    assert visits(TREE, [1, 7, 4]) == [Visit(0, 1), Visit(1, None)]
    assert visits(TREE, [7, 1]) == [Visit(0, None)]


def test_what_was_not_decided_is_not_counted() -> None:
    assert visits(TREE, [2]) == [Visit(0, 2)]
    assert visits(TREE, []) == []
    assert visits(TokenTree.root_only(9), [1]) == []
