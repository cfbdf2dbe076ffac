"""Level-wise growth: which children a node gets, which nodes are expanded, and the tree that is left."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from treeserve_core.noise import gumbel
from treeserve_core.sampling import SamplingParams
from treeserve_speculator.sources.growth import GrowthLimits, TreeGrowth, best_children

GREEDY = SamplingParams()
LIMITS = GrowthLimits(max_nodes=6, max_depth=3, width=2, min_probability=1e-3)


def _logits(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


@pytest.mark.parametrize("size", [3, 50, 5000])
def test_greedy_children_are_the_top_of_the_softmax(size: int) -> None:
    logits = _logits(size)
    ids, log_probs = best_children(logits, GREEDY, 5, 4)
    expected = np.argsort(-logits, kind="stable")[:4]
    softmax = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    assert ids == expected.tolist()
    assert np.exp(log_probs) == pytest.approx(softmax[expected])


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(10, dtype=np.float32)
    logits[7] = logits[3] = 1.0
    assert best_children(logits, GREEDY, 0, 3)[0][:2] == [3, 7]


@pytest.mark.parametrize("size", [50, 1000])
def test_coupled_children_are_the_top_of_logits_and_noise(size: int) -> None:
    sampling = SamplingParams(temperature=0.7, seed=11)
    logits = _logits(size)
    scores = logits.astype(np.float64) / sampling.temperature + gumbel(11, 42, np.arange(size))
    expected = np.argsort(-scores)[:3]
    ids, log_probs = best_children(logits, sampling, 42, 3)
    assert ids == expected.tolist()
    assert np.exp(log_probs) == pytest.approx((np.exp(scores) / np.exp(scores).sum())[expected])


def test_coupled_children_of_a_large_vocabulary_carry_the_draw() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    hits = 0
    for position in range(40):
        logits = _logits(20_000, position) * 2
        scores = logits.astype(np.float64) + gumbel(3, position, np.arange(len(logits)))
        hits += int(np.argmax(scores)) == best_children(logits, sampling, position, 1)[0][0]
    assert hits >= 36  # the draw lies outside the 1,024 most probable tokens only rarely


def test_coupled_children_depend_on_seed_and_position() -> None:
    logits = _logits(200)
    draws = {
        tuple(best_children(logits, SamplingParams(temperature=1.0, seed=seed), position, 3)[0])
        for seed in range(4)
        for position in range(4)
    }
    assert len(draws) > 8


def _grown(limits: GrowthLimits, seed: int, eos: frozenset[int] = frozenset()) -> tuple[TreeGrowth, list[list[int]]]:
    """Grow over random conditional probabilities; returns the levels too."""
    rng = random.Random(seed)
    growth = TreeGrowth(0, limits, eos)
    levels = []
    while level := growth.next_level():
        levels.append(level)
        for node in level:
            weights = sorted((rng.random() for _ in range(limits.width)), reverse=True)
            total = sum(weights) * 1.2
            growth.expand(node, rng.sample(range(1, 50), limits.width), [math.log(w / total) for w in weights])
    return growth, levels


@pytest.mark.parametrize("seed", range(5))
def test_growth_keeps_its_limits(seed: int) -> None:
    growth, levels = _grown(LIMITS, seed)
    tree = growth.tree()
    assert levels[0] == [0] and len(levels) <= LIMITS.max_depth
    assert all(len(level) <= LIMITS.width for level in levels)
    assert all(growth.depths[node] == depth for depth, level in enumerate(levels) for node in level)
    assert len(tree) - 1 <= LIMITS.max_nodes and max(tree.depths) <= LIMITS.max_depth


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_is_the_best_of_all_candidates(seed: int) -> None:
    growth, _ = _grown(LIMITS, seed)
    tree = growth.tree()
    kept = {_path(tree.token_ids, tree.parents, node) for node in range(len(tree))}
    for node in range(len(growth.token_ids)):
        if _path(growth.token_ids, growth.parents, node) not in kept:
            assert growth._path_log_probs[node] <= min(tree.path_log_probs)


def _path(token_ids: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node > 0:
        path.append(token_ids[node])
        node = parents[node]
    return tuple(path)


def test_unpromising_nodes_are_not_expanded() -> None:
    limits = GrowthLimits(max_nodes=8, max_depth=6, width=4, min_probability=0.1)
    growth = TreeGrowth(0, limits, frozenset())
    assert growth.next_level() == [0]
    growth.expand(0, [10, 11, 12], [math.log(0.6), math.log(0.3), math.log(0.05)])
    assert [growth.token_ids[node] for node in growth.next_level()] == [10, 11]
    growth.expand(1, [20, 21], [math.log(0.5), math.log(0.1)])
    growth.expand(2, [22], [math.log(0.3)])
    assert [growth.token_ids[node] for node in growth.next_level()] == [20]


def test_nodes_that_cannot_reach_the_tree_are_not_expanded() -> None:
    limits = GrowthLimits(max_nodes=2, max_depth=6, width=4, min_probability=1e-6)
    growth = TreeGrowth(0, limits, frozenset())
    growth.next_level()
    growth.expand(0, [10, 11, 12], [math.log(0.5), math.log(0.3), math.log(0.2)])
    assert [growth.token_ids[node] for node in growth.next_level()] == [10, 11]


def test_end_of_sequence_is_a_leaf() -> None:
    growth = TreeGrowth(0, LIMITS, frozenset({10}))
    growth.next_level()
    growth.expand(0, [10, 11], [math.log(0.8), math.log(0.1)])
    assert [growth.token_ids[node] for node in growth.next_level()] == [11]
    assert 10 in growth.tree().token_ids


def test_an_end_of_sequence_root_is_expanded() -> None:
    assert TreeGrowth(10, LIMITS, frozenset({10})).next_level() == [0]
