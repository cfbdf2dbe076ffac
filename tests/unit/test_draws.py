"""Draws in token trees: what is refused, how they are ranked, and that every cut keeps them in draw order."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeserve_core.draws import Draws, draw_log_prob
from treeserve_core.errors import InvalidTreeError
from treeserve_core.noise import UniformStream, uniform_counters, uniforms
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree, merge


def draws(*token_ids: int, support: tuple[int, ...] = (10, 11, 12, 13)) -> Draws:
    return Draws(token_ids, support, (1 / len(support),) * len(support))


#       1 (root): drew 10, 11, 10, 12
#      /  |  \
#    10   11   12
#    / \
#  10   13: drawn in the order 13, 10
TREE = TokenTree(
    (1, 10, 11, 12, 10, 13),
    (-1, 0, 0, 0, 1, 1),
    (0.0, *(-9.0,) * 5),
    draws=(draws(10, 11, 10, 12), draws(13, 10), None, None, None, None),
)


@pytest.mark.parametrize(
    ("token_ids", "support", "weights", "reason"),
    [
        ((), (1,), (1.0,), "0 draws"),
        ((1,) * 65, (1,), (1.0,), "65 draws"),
        ((1,), tuple(range(65)), (1 / 65,) * 65, "65 ids"),
        ((1,), (), (), "0 ids"),
        ((1,), (1, 2), (1.0,), "2 ids with 1"),
        ((1,), (1, 1), (0.5, 0.5), "repeated"),
        ((1,), (1, -2), (0.5, 0.5), "negative"),
        ((1,), (1, 2), (1.0, 0.0), "positive"),
        ((1,), (1, 2), (1.0, -0.1), "positive"),
        ((1,), (1, 2), (0.5, math.nan), "positive"),
        ((1,), (1, 2), (0.5, math.inf), "positive"),
        ((1,), (1, 2), (0.5, 0.4985), "sum to"),
        ((3,), (1, 2), (0.5, 0.5), "no weight"),
    ],
)
def test_draws_that_make_no_sense_are_refused(
    token_ids: tuple[int, ...], support: tuple[int, ...], weights: tuple[float, ...], reason: str
) -> None:
    with pytest.raises(InvalidTreeError, match=reason):
        Draws(token_ids, support, weights)


def test_weights_are_normalised() -> None:
    q = Draws((1,), (1, 2), (0.5, 0.4995)).probabilities
    assert q.sum() == pytest.approx(1.0, abs=1e-15) and q[0] == 0.5 / 0.9995


def test_what_was_drawn_must_be_there() -> None:
    with pytest.raises(InvalidTreeError, match="below node 0 is not among its children"):
        TokenTree((1, 10), (-1, 0), draws=(draws(10, 11), None))
    with pytest.raises(InvalidTreeError, match="draws for 1"):
        TokenTree((1, 10), (-1, 0), draws=(draws(10),))


class TestRanking:
    def test_draws_rank_by_their_order_alone(self) -> None:
        first, second, third, fourth = map(draw_log_prob, range(4))
        expected = sorted(
            [(first, 1), (second, 2), (third, 1), (fourth, 3), (first + first, 5), (first + second, 4)], reverse=True
        )
        assert list(TREE.ranking) == expected
        other_log_probs = TokenTree(TREE.token_ids, TREE.parents, (0.0, -1, -2, -0.1, 0, -5), draws=TREE.draws)
        assert other_log_probs.ranking == TREE.ranking

    def test_other_tokens_rank_the_same(self) -> None:
        """The same draws of other tokens: no value moves a draw."""
        renamed = {10: 12, 11: 10, 12: 13, 13: 11}
        other = TokenTree(
            (1, *(renamed[t] for t in TREE.token_ids[1:])),
            TREE.parents,
            TREE.log_probs,
            draws=(draws(12, 10, 12, 13), draws(11, 12), None, None, None, None),
        )
        assert other.ranking == TREE.ranking

    def test_a_child_that_was_not_drawn_ranks_after_the_last_draw(self) -> None:
        tree = merge([TokenTree((1, 10, 11), (-1, 0, 0), (0.0, -0.1, -0.2)), _only(10, 10)])
        assert [node for _, node in tree.ranking] == [1, 1, 2]
        assert tree.path_log_probs == (0.0, draw_log_prob(0), draw_log_prob(1))
        unlikely = merge([_only(10, 10), TokenTree((1, 11), (-1, 0), (0.0, -9.0))])
        assert unlikely.path_log_probs[2] == -9.0

    def test_without_draws_nothing_changes(self) -> None:
        tree = TokenTree((1, 2, 3, 4), (-1, 0, 0, 1), (0.0, -0.5, -0.2, -0.1))
        assert [node for _, node in tree.ranking] == [2, 1, 3]


def _only(*tokens: int) -> TokenTree:
    distinct = tuple(dict.fromkeys(tokens))
    return TokenTree(
        (1, *distinct),
        (-1, *[0] * len(distinct)),
        (0.0, *[-1.0] * len(distinct)),
        draws=(draws(*tokens), *[None] * len(distinct)),
    )


class TestCuts:
    @pytest.mark.parametrize("max_nodes", range(8))
    def test_pruning_keeps_a_beginning_of_each_nodes_draws(self, max_nodes: int) -> None:
        pruned = TREE.pruned(max_nodes)
        kept = [entry.token_ids if entry else () for entry in pruned.draws or [None] * len(pruned)]
        assert kept[0] == TREE.draws[0].token_ids[: len(kept[0])]  # type: ignore[index, union-attr]
        assert len(pruned) - 1 + pruned.repeated_draws == min(max_nodes, 6)
        assert (pruned is TREE) == (max_nodes >= 6)

    def test_a_repeat_takes_a_place_of_the_budget(self) -> None:
        """Else whether the next draw is kept would depend on the value of this one."""
        for values in itertools.product((10, 11), repeat=3):
            kept = _only(*values).pruned(2).draws
            assert kept is not None and kept[0] is not None and kept[0].token_ids == values[:2]

    def test_depth_and_an_empty_budget(self) -> None:
        shallow = TREE.pruned(99, max_depth=1)
        assert shallow.draws == (TREE.draws[0], None, None, None)  # type: ignore[index]
        assert TREE.pruned(0) == TokenTree((1,), (-1,), (0.0,))
        assert TREE.subtree(()).draws is None

    def test_rerooting_keeps_what_was_drawn_below(self) -> None:
        below = TREE.rerooted([10])
        assert below is not None and below.token_ids == (10, 10, 13) and below.draws == (draws(13, 10), None, None)
        assert DraftProposal(2, TREE).rebased([7, 1, 10]) == below
        leaf = TREE.rerooted([11])
        assert leaf is not None and leaf.draws is None

    @given(st.lists(st.integers(10, 13), min_size=1, max_size=6), st.integers(0, 7))
    def test_any_budget_on_one_node(self, tokens: list[int], budget: int) -> None:
        pruned = _only(*tokens).pruned(budget)
        kept = pruned.draws[0] if pruned.draws else None
        assert (kept.token_ids if kept else ()) == tuple(tokens[:budget])
        assert set(pruned.token_ids[1:]) == set(tokens[:budget])


class TestMerge:
    def test_the_first_trees_draws_count(self) -> None:
        merged = merge([_only(10, 11), _only(12, 10, 12)])
        assert merged.draws is not None and merged.draws[0] == draws(10, 11)
        assert merged.token_ids == (1, 10, 11, 12), "the other's 12 stands as proposed outright"

    def test_draws_below_a_node_that_another_tree_has_too(self) -> None:
        chain = TokenTree.chain([1, 10, 13], (0.0, -0.1, -0.1))
        for trees in ([TREE, chain], [chain, TREE]):
            merged = merge(trees)
            (node,) = [i for i in merged.children[0] if merged.token_ids[i] == 10]
            assert merged.draws_below(0) == TREE.draws_below(0)
            assert merged.draws_below(node) == draws(13, 10)

    def test_trees_without_draws_have_none(self) -> None:
        assert merge([TokenTree.chain([1, 2]), TokenTree.chain([1, 3])]).draws is None


class TestUniforms:
    def test_streams_share_nothing_with_each_other_or_the_gumbel_noise(self) -> None:
        verifier, drafter = (uniforms(7, 20, stream, 200) for stream in UniformStream)
        noise = uniform_counters(7, 20, np.arange(400)) * 2.0**-53
        assert len({*verifier, *drafter, *noise}) == 800

    def test_they_are_a_function_of_seed_position_and_index(self) -> None:
        few, many = uniforms(7, 20, UniformStream.VERIFIER, 3), uniforms(7, 20, UniformStream.VERIFIER, 9)
        assert few.tolist() == many[:3].tolist()
        assert set(few) != set(uniforms(8, 20, UniformStream.VERIFIER, 3))
        assert set(few) != set(uniforms(7, 21, UniformStream.VERIFIER, 3))
        assert many.min() > 0.0 and many.max() < 1.0
