"""Multi-step acceptance gives the target's distribution exactly: every draft and every outcome is enumerated.

Each mistake that is known to bias it is made here on purpose and must fail the same check.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.exact_laws import (
    ROOT,
    Tables,
    WeightedTrees,
    drawn_trees,
    emitted_law,
    target_law,
    total_variation,
)
from support.sequences import make_config, make_sequence

from treeserve_core.draws import Draws, draw_log_prob
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_core.tree import TokenTree, merge
from treeserve_engine import multi_step
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.selection import Offer, Selection
from treeserve_verifier.step_plan import Candidate

EXACT = 1e-12
SEEDS = (1, 2, 3)
Rewrite = Callable[[TokenTree], TokenTree]


def bias(tables: Tables, trees: WeightedTrees, length: int, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> float:
    """Total variation between what is emitted and the target."""
    temperature = kwargs["params"].temperature if "params" in kwargs else 1.0
    law = emitted_law(tables, trees, length, monkeypatch, **kwargs)
    return total_variation(law, target_law(tables, length, temperature))


def rewritten(trees: WeightedTrees, rewrite: Rewrite) -> WeightedTrees:
    return [(weight, rewrite(tree)) for weight, tree in trees]


def outright(*paths: tuple[int, ...], log_prob: float = math.log(0.3)) -> TokenTree:
    """A tree that proposes these paths outright."""
    return merge([TokenTree.chain((ROOT, *path), (0.0, *[log_prob] * len(path))) for path in paths])


class TestExact:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("counts", [(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1)])
    def test_independent_draws(self, seed: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(seed)
        trees = drawn_trees(tables, counts)
        assert counts == (1,) * len(counts) or any(tree.repeated_draws for _, tree in trees)
        assert bias(tables, trees, len(counts) + 1, monkeypatch) < EXACT

    def test_more_tokens_than_three(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(4, vocab=5)
        assert bias(tables, drawn_trees(tables, (3,)), 2, monkeypatch) < EXACT

    def test_temperature_and_filters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(5)
        cold = SamplingParams(temperature=0.6)
        assert bias(tables, drawn_trees(tables, (2, 1)), 2, monkeypatch, params=cold) < EXACT
        tables.set((), (0.7, 0.3, 0.0), (0.0, 0.6, 0.4))  # a filtered target, a drafter that does not know
        assert bias(tables, drawn_trees(tables, (3,)), 1, monkeypatch) < EXACT

    def test_a_drafter_that_is_the_target_is_always_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(6)
        tables.set((), (0.5, 0.25, 0.25), (0.5, 0.25, 0.25))  # the residual is 0
        assert bias(tables, drawn_trees(tables, (2,)), 1, monkeypatch) < 1e-7  # as far as float32 logits hold p

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("paths", [((1,),), ((1,), (2,)), ((2, 1), (0, 0)), ((0, 1), (0, 2), (1, 1))])
    def test_outright_children_alone(
        self, seed: int, paths: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert bias(Tables(seed), [(1.0, outright(*paths))], 3, monkeypatch) < EXACT

    @pytest.mark.parametrize("drawn_first", [True, False])
    @pytest.mark.parametrize("paths", [((1,),), ((0, 2), (2, 0))])
    @pytest.mark.parametrize("counts", [(2,), (2, 1)])
    def test_drawn_and_outright_children_merged(
        self,
        counts: tuple[int, ...],
        paths: tuple[tuple[int, ...], ...],
        drawn_first: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tables = Tables(7)
        copied = outright(*paths)
        trees = rewritten(
            drawn_trees(tables, counts), lambda tree: merge([tree, copied] if drawn_first else [copied, tree])
        )
        assert any(len(tree.children[0]) > len(set((tree.draws or [])[0].token_ids)) for _, tree in trees)  # type: ignore[index, union-attr]
        assert bias(tables, trees, 3, monkeypatch) < EXACT

    def test_two_drafters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tables, others = Tables(8), Tables(9)
        trees = [
            (w * v, merge([tree, other]))
            for (w, tree), (v, other) in itertools.product(drawn_trees(tables, (2,)), drawn_trees(others, (1, 1)))
        ]
        assert bias(tables, trees, 2, monkeypatch) < EXACT


class TestExactAfterPruning:
    """Whatever is cut by draw order and depth leaves the law alone."""

    @pytest.mark.parametrize("max_nodes", range(6))
    def test_a_budget_of_nodes(self, max_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(10)
        trees = rewritten(drawn_trees(tables, (3, 1)), lambda tree: tree.pruned(max_nodes))
        assert max(len(tree) for _, tree in trees) <= max_nodes + 1
        assert bias(tables, trees, 2, monkeypatch) < EXACT

    @pytest.mark.parametrize("max_nodes", range(1, 7))
    def test_a_budget_of_nodes_beside_outright_ones(self, max_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(11)
        copied = outright((1, 2), (2, 2), log_prob=math.log(0.9))
        trees = rewritten(drawn_trees(tables, (2, 1)), lambda tree: merge([copied, tree]).pruned(max_nodes))
        assert bias(tables, trees, 3, monkeypatch) < EXACT

    def test_a_limit_of_depth(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(12)
        trees = rewritten(drawn_trees(tables, (2, 2)), lambda tree: tree.pruned(99, max_depth=1))
        assert {max(tree.depths) for _, tree in trees} == {1}
        assert bias(tables, trees, 2, monkeypatch) < EXACT

    @pytest.mark.parametrize("committed", range(3))
    def test_a_tree_that_is_rerooted(self, committed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is left under a committed token, given that the token was drawn."""
        tables = Tables(13)
        left = [(w, tree.rerooted([committed])) for w, tree in drawn_trees(tables, (2, 2))]
        total = sum(w for w, tree in left if tree is not None)
        trees = [
            (w / total, dataclasses.replace(tree, token_ids=(ROOT, *tree.token_ids[1:])))
            for w, tree in left
            if tree is not None
        ]
        assert bias(tables.under(committed), trees, 1, monkeypatch) < EXACT

    @pytest.mark.parametrize("cost", ["free", "slope", "steep", "cliff"])
    @pytest.mark.parametrize("calibration", [0.5, 1.0, 3.0])
    def test_the_planner(self, cost: str, calibration: float, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(14)
        copied = outright((1, 2), log_prob=math.log(0.9))
        trees = rewritten(drawn_trees(tables, (2, 1)), lambda tree: merge([tree, copied]))
        assert bias(tables, rewritten(trees, planned(cost, calibration)), 3, monkeypatch) < EXACT

    @pytest.mark.parametrize("max_nodes", [1, 2, 3])
    def test_the_planner_under_a_requests_bound(self, max_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = Tables(15)
        trees = rewritten(drawn_trees(tables, (3, 1)), planned("free", 1.0, SequenceLimits(max_nodes=max_nodes)))
        assert max(len(tree) for _, tree in trees) == max_nodes + 1
        assert bias(tables, trees, 2, monkeypatch) < EXACT


COSTS = {
    "free": {1: 10.0, 64: 10.0},
    "slope": {1: 10.0, 64: 60.0},
    "steep": {1: 1.0, 64: 64.0},
    "cliff": {1: 10.0, 3: 10.0, 4: 11.3, 64: 11.3},
}


def planned(cost: str, calibration: float, limits: SequenceLimits | None = None) -> Rewrite:
    """What the step planner leaves of a tree."""
    planner = StepPlanner(make_config(), CostModel(COSTS[cost]))

    def plan(tree: TokenTree) -> TokenTree:
        sequence = make_sequence((1, ROOT), limits=limits)
        sequence.calibration = calibration
        kept = planner.plan([Candidate(sequence, 1, tree)]).sequences[0].tree
        assert kept is not None
        return kept

    return plan


class TestUniforms:
    def test_a_uniform_of_exactly_0_accepts_nothing_impossible(self) -> None:
        draws = Draws((2, 2), (1, 2), (0.5, 0.5))
        p = np.array([0.75, 0.25, 0.0])
        assert multi_step.choose(p, draws, [], [0.0, 0.0, 0.0]) == 0
        assert multi_step.choose(p, None, [2, 1], [0.0, 0.0, 0.0]) == 1

    def test_a_grid_of_uniforms_is_exact_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = grid_tables()
        assert bias(tables, drawn_trees(tables, (1,)), 1, monkeypatch, grid=4) < 1e-7

    def test_what_is_left_is_sampled_in_proportion(self) -> None:
        p = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
        us = (np.arange(400) + 0.5) / 400
        assert np.bincount([multi_step.sample(p, u) for u in us], minlength=6).tolist() == [0, 100, 0, 200, 100, 0]
        assert multi_step.sample(p, 0.0) == 1
        assert multi_step.sample(p, 1.0 - 2**-53) == 4

    def test_a_residual_of_zero_keeps_p(self) -> None:
        p = np.array([0.5, 0.5])
        assert multi_step.residual(p, np.array([0, 1]), np.array([0.6, 0.6])) is p


def grid_tables() -> Tables:
    """Acceptance probabilities that a grid of four uniforms holds exactly."""
    tables = Tables(0)
    tables.set((), (0.5, 0.5, 0.0), (0.25, 0.25, 0.5))
    return tables


def with_draws(tables: Tables, tokens: Sequence[int]) -> TokenTree:
    """A tree that claims that these tokens were drawn independently below its root."""
    distinct = tuple(dict.fromkeys(tokens))
    draws = tables.draws((), tokens) if tokens else None
    return TokenTree((ROOT, *distinct), (-1, *[0] * len(distinct)), draws=(draws, *[None] * len(distinct)))


def without_replacement(tables: Tables) -> WeightedTrees:
    q = tables.q(())
    return [
        (float(q[first] * q[second] / (1 - q[first])), with_draws(tables, (first, second)))
        for first, second in itertools.permutations(range(3), 2)
    ]


def tampered(change: Callable[[Tables, tuple[int, ...]], Sequence[int]]) -> Callable[[Tables], WeightedTrees]:
    """Three independent draws, of which something is made."""

    def trees(tables: Tables) -> WeightedTrees:
        drawn = ((w, t.draws_below(0)) for w, t in drawn_trees(tables, (3,)))
        return [(w, with_draws(tables, change(tables, draws.token_ids))) for w, draws in drawn if draws is not None]

    return trees


def top_two(tables: Tables) -> WeightedTrees:
    return [(1.0, with_draws(tables, np.argsort(-tables.q(()))[:2].tolist()))]


# Mistakes, each with the largest total variation between its law and the target's over TABLES.
TREES: dict[str, tuple[Callable[[Tables], WeightedTrees], float]] = {
    "top-k children under the ratio test": (top_two, 0.5717),
    "no residual update for a repeat": (tampered(lambda _, tokens: list(dict.fromkeys(tokens))), 0.0907),
    "examined by q, not in draw order": (tampered(lambda t, tokens: sorted(tokens, key=lambda x: -t.q(())[x])), 0.3436),
    "dropped by the drafter's confidence": (
        tampered(lambda t, tokens: [x for x in tokens if t.q(())[x] > 0.2]),
        0.1798,
    ),
    "repeats free in a budget of one node": (
        tampered(lambda _, tokens: list(itertools.takewhile(lambda x: x == tokens[0], tokens))),
        0.0552,
    ),
    "without replacement, plain q": (without_replacement, 0.2278),
}
TABLES = range(1, 13)


RESIDUALS: dict[str, tuple[Callable[[Any, Any], Any], float]] = {
    "keep p": (lambda p, q: p, 0.2981),
    "|p - q|": (lambda p, q: np.abs(p - q), 0.6464),
    "p without the ids of q": (lambda p, q: np.where(q >= p, 0.0, p), 0.1175),
}


class TestMistakes:
    """What is known to bias the rule fails the check that the rule passes."""

    def worst(self, trees: Callable[[Tables], WeightedTrees], monkeypatch: pytest.MonkeyPatch) -> float:
        return max(bias(Tables(seed), trees(Tables(seed)), 1, monkeypatch) for seed in TABLES)

    @pytest.mark.parametrize("mistake", TREES)
    def test_in_the_tree(self, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
        trees, variation = TREES[mistake]
        assert self.worst(tampered(lambda _, tokens: tokens), monkeypatch) < EXACT
        assert self.worst(trees, monkeypatch) == pytest.approx(variation, abs=1e-3)

    @pytest.mark.parametrize("mistake", RESIDUALS)
    def test_in_the_residual(self, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong, variation = RESIDUALS[mistake]

        def residual(p: Any, ids: Any, q: Any) -> Any:
            full = np.zeros(len(p))
            full[ids] = q
            left = wrong(p, full)
            return left / left.sum() if left.sum() > 0 else p

        monkeypatch.setattr(multi_step, "residual", residual)
        worst = self.worst(lambda tables: drawn_trees(tables, (2,)), monkeypatch)
        assert worst == pytest.approx(variation, abs=1e-3)

    @pytest.mark.parametrize("shuffled", [False, True])
    def test_without_replacement_shuffled(self, shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """With q renormalised, draw order is right (which checks this check) and any other is not."""

        def trials(draws: Draws | None, _: object) -> Iterator[tuple[int, float, npt.NDArray[np.int64], Any]]:
            if draws is None:
                return
            first, second = draws.token_ids
            q = draws.probabilities
            rest = np.where(np.arange(3) == first, 0.0, q) / (1 - q[first])
            given = [(first, q[first], np.arange(3), q), (second, rest[second], np.arange(3), rest)]
            yield from reversed(given) if shuffled else given

        monkeypatch.setattr(multi_step, "_trials", trials)
        worst = self.worst(without_replacement, monkeypatch)
        assert worst == pytest.approx(0.2436, abs=1e-3) if shuffled else worst < EXACT

    def test_outright_children_before_the_draws(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = multi_step._trials

        def outright_first(draws: Draws | None, tokens: Sequence[int]) -> Iterator[Any]:
            yield from right(None, tokens)
            yield from right(draws, [])

        def trees(tables: Tables) -> WeightedTrees:
            return rewritten(drawn_trees(tables, (1,)), lambda tree: merge([tree, outright((1,))]))

        assert self.worst(trees, monkeypatch) < EXACT
        monkeypatch.setattr(multi_step, "_trials", outright_first)
        assert self.worst(trees, monkeypatch) == pytest.approx(0.2289, abs=1e-3)

    def test_a_comparison_that_is_not_strict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a grid of four uniforms, where exactly 0 has weight, it accepts what the target never says."""

        def choose(p: Any, draws: Draws | None, _: object, coins: Any) -> int:
            for (token_id, q_of_token, ids, q), u in zip(multi_step._trials(draws, []), coins, strict=False):
                if u <= min(1.0, p[token_id] / q_of_token):
                    return token_id
                p = multi_step.residual(p, ids, q)
            return multi_step.sample(p, coins[-1])

        tables = grid_tables()
        monkeypatch.setattr(multi_step, "choose", choose)
        assert bias(tables, drawn_trees(tables, (1,)), 1, monkeypatch, grid=4) == pytest.approx(0.125)

    def test_a_planner_that_counts_on_what_follows_a_draw(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The planner's rule for other trees: as many nodes as pay best. A draw that repeats one has none below."""

        def trees(tables: Tables) -> WeightedTrees:
            return rewritten(drawn_trees(tables, (2, 1)), planned("cliff", 1.0))

        def best_number(self: StepPlanner, rated: list[Any], roots: int) -> list[Any]:
            selection = Selection([Offer(rated)], self._cost)
            selection.choose(len(rated))
            return rated[: selection.counts[0]]

        assert self.worst(trees, monkeypatch) < EXACT
        monkeypatch.setattr(StepPlanner, "_worth_a_row", best_number)
        assert self.worst(trees, monkeypatch) == pytest.approx(0.0511, abs=1e-3)


def test_guesses_for_draws_fall_and_look_at_nothing_else() -> None:
    guesses = [draw_log_prob(rank) for rank in range(8)]
    assert guesses == sorted(guesses, reverse=True) and len(set(guesses)) == 8
    assert sum(map(math.exp, guesses)) < 1.0
