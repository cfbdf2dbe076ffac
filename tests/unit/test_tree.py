"""Token trees: every invariant is refused when broken, and every operation equals its brute-force definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeserve_core.errors import InvalidTreeError
from treeserve_core.tree import TokenTree, merge

Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 14, root: int | None = None, vocab: int = 4) -> TokenTree:
    token_ids, parents = [draw(st.integers(0, vocab - 1)) if root is None else root], [-1]
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent, token_id = draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, vocab - 1))
        if (parent, token_id) not in zip(parents, token_ids, strict=True):
            parents.append(parent)
            token_ids.append(token_id)
    n = len(parents)
    log_probs = draw(st.none() | st.lists(st.sampled_from([0.0, -0.25, -1.0, -2.0]), min_size=n, max_size=n))
    masks = draw(st.none() | st.lists(st.integers(0, 7), min_size=n, max_size=n))
    return TokenTree(
        tuple(token_ids),
        tuple(parents),
        None if log_probs is None else (0.0, *log_probs[1:]),
        None if masks is None else tuple(masks),
    )


def paths_of(tree: TokenTree) -> list[Path]:
    """Tokens from the root (excluded) to each node, straight from the definition."""
    paths: list[Path] = [()]
    for i in range(1, len(tree)):
        paths.append((*paths[tree.parents[i]], tree.token_ids[i]))
    return paths


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (((), ()), "at least a root"),
        (((1, 2), (-1,)), "2 tokens but 1 parents"),
        (((1,), (0,)), "root's parent"),
        (((1, 2), (-2, 0)), "root's parent"),
        (((1, -1), (-1, 0)), "negative token"),
        (((-5,), (-1,)), "negative token"),
        (((1, 2), (-1, 1)), "parents precede"),
        (((1, 2, 3), (-1, 2, 0)), "parents precede"),
        (((1, 2), (-1, -1)), "parents precede"),
        (((1, 2, 2), (-1, 0, 0)), "repeats token 2"),
        (((1, 2), (-1, 0), (0.0,)), "log-probabilities"),
        (((1, 2), (-1, 0), (0.0, 0.1)), "log-probabilities"),
        (((1, 2), (-1, 0), (0.0, math.nan)), "log-probabilities"),
        (((1, 2), (-1, 0), None, (1,)), "source masks"),
    ],
)
def test_broken_invariants_are_refused(arguments: tuple[object, ...], reason: str) -> None:
    with pytest.raises(InvalidTreeError, match=reason):
        TokenTree(*arguments)  # type: ignore[arg-type]


def test_same_token_under_different_parents_is_legal() -> None:
    assert len(TokenTree((1, 2, 2, 2), (-1, 0, 1, 2))) == 4


def test_minus_infinity_is_a_legal_log_probability() -> None:
    assert TokenTree((1, 2), (-1, 0), (0.0, -math.inf)).path_log_probs == (0.0, -math.inf)


def test_chain_and_root_only() -> None:
    chain = TokenTree.chain([7, 8, 9], [0.0, -1.0, -0.5])
    assert chain.parents == (-1, 0, 1)
    assert chain.depths == (0, 1, 2)
    assert chain.path_log_probs == (0.0, -1.0, -1.5)
    assert TokenTree.root_only(7) == TokenTree.chain([7])


@given(trees())
def test_derived_shape_equals_brute_force(tree: TokenTree) -> None:
    paths = paths_of(tree)
    assert tree.depths == tuple(map(len, paths))
    for node, path in enumerate(paths):
        assert tuple(tree.token_ids[i] for i in tree.path(node)) == path
        assert tree.children[node] == tuple(i for i in range(1, len(tree)) if tree.parents[i] == node)
        for token_id in range(5):
            expected = paths.index((*path, token_id)) if (*path, token_id) in paths else None
            assert tree.child(node, token_id) == expected


@given(trees(max_nodes=10))
def test_ancestor_words_equal_brute_force(tree: TokenTree) -> None:
    words = tree.ancestor_words()
    assert words.shape == (len(tree), 1)
    for node in range(len(tree)):
        for other in range(len(tree)):
            visible = other == node or other == 0 or other in tree.path(node)
            assert bool(int(words[node, other // 64]) >> (other % 64) & 1) == visible


@pytest.mark.parametrize("n", [63, 64, 65, 128, 130])
def test_ancestor_words_across_word_borders(n: int) -> None:
    words = TokenTree.chain(range(n)).ancestor_words()
    assert words.shape == (n, -(-n // 64))
    assert words.dtype == np.uint64
    for node in (0, 62, n - 1):
        as_integer = sum(int(word) << (64 * i) for i, word in enumerate(words[node]))
        assert as_integer == (1 << (node + 1)) - 1


@given(st.lists(trees(root=0), min_size=1, max_size=4))
def test_merge_is_the_union_of_paths(parts: list[TokenTree]) -> None:
    merged = merge(parts)
    paths = paths_of(merged)
    assert len(set(paths)) == len(paths)
    assert set(paths) == {path for part in parts for path in paths_of(part)}
    for node, path in enumerate(paths):
        found = [(part, paths_of(part).index(path)) for part in parts if path in paths_of(part)]
        if merged.log_probs is not None:
            assert merged.log_probs[node] == max(part.log_probs[i] for part, i in found if part.log_probs is not None)
        if merged.source_masks is not None:
            mask = 0
            for part, i in found:
                mask |= part.source_masks[i] if part.source_masks is not None else 0
            assert merged.source_masks[node] == mask
    assert (merged.log_probs is not None) == all(part.log_probs is not None for part in parts)
    assert (merged.source_masks is not None) == any(part.source_masks is not None for part in parts)


def test_two_sources_proposing_the_same_token_share_one_node() -> None:
    merged = merge([TokenTree((1, 5), (-1, 0), (0.0, -1.0), (1, 1)), TokenTree((1, 5), (-1, 0), (0.0, -0.5), (2, 2))])
    assert merged == TokenTree((1, 5), (-1, 0), (0.0, -0.5), (3, 3))


def test_merge_refuses_nothing_and_different_roots() -> None:
    with pytest.raises(InvalidTreeError, match="nothing"):
        merge([])
    with pytest.raises(InvalidTreeError, match="different roots"):
        merge([TokenTree.root_only(1), TokenTree.root_only(2)])


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
def test_rerooting_keeps_exactly_what_lies_below(tree: TokenTree, committed: list[int]) -> None:
    paths, prefix = paths_of(tree), tuple(committed)
    rerooted = tree.rerooted(committed)
    if prefix not in paths:
        assert rerooted is None
        return
    assert rerooted is not None
    assert rerooted.token_ids[0] == (prefix[-1] if prefix else tree.token_ids[0])
    below = [i for i, path in enumerate(paths) if path[: len(prefix)] == prefix]
    assert paths_of(rerooted) == [paths[i][len(prefix) :] for i in below]
    if tree.log_probs is not None:
        assert rerooted.log_probs == (0.0, *(tree.log_probs[i] for i in below[1:]))
    if tree.source_masks is not None:
        assert rerooted.source_masks == tuple(tree.source_masks[i] for i in below)


@given(trees(), st.integers(0, 12), st.none() | st.integers(0, 5))
def test_pruning_keeps_the_most_probable_nodes_and_their_parents(
    tree: TokenTree, max_nodes: int, max_depth: int | None
) -> None:
    pruned = tree.pruned(max_nodes, max_depth)  # a missing parent would raise
    limit = len(tree) if max_depth is None else max_depth
    eligible = [i for i in range(1, len(tree)) if tree.depths[i] <= limit]
    assert len(pruned) - 1 == min(max_nodes, len(eligible))
    paths = paths_of(tree)
    kept = {paths.index(path) for path in paths_of(pruned)} - {0}
    assert all(tree.depths[i] <= limit for i in kept)
    rank = {i: (-tree.path_log_probs[i], tree.depths[i]) for i in eligible}
    assert all(rank[i] <= rank[j] for i in kept for j in eligible if j not in kept)


def test_pruning_a_tree_that_fits_returns_it() -> None:
    tree = TokenTree.chain([1, 2, 3])
    assert tree.pruned(2) is tree
    assert tree.pruned(2, max_depth=2) is tree
    assert tree.pruned(2, max_depth=1) == TokenTree.chain([1, 2])
    assert tree.pruned(0) == TokenTree.root_only(1)


def test_subtree_refuses_orphans() -> None:
    with pytest.raises(InvalidTreeError, match="without its parent"):
        TokenTree.chain([1, 2, 3]).subtree([2])


@given(trees(root=0), trees(root=0), st.integers(0, 8), st.lists(st.integers(0, 3), max_size=3))
def test_what_is_made_of_sound_trees_is_sound(a: TokenTree, b: TokenTree, max_nodes: int, path: list[int]) -> None:
    """These operations do not check what they make; the constructor does."""
    for tree in (merge([a, b]), a.pruned(max_nodes, 3), a.rerooted(path)):
        if tree is not None:
            checked = TokenTree(tree.token_ids, tree.parents, tree.log_probs, tree.source_masks, tree.draws)
            assert checked == tree and hash(checked) == hash(tree)


def test_a_source_marks_all_nodes_but_the_root() -> None:
    tree = TokenTree((5, 6, 7), (-1, 0, 1), (0.0, -0.1, -0.2))
    assert tree.drafted_by(4) == TokenTree((5, 6, 7), (-1, 0, 1), (0.0, -0.1, -0.2), (0, 4, 4))
