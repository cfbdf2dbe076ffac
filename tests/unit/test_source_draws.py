"""Drafting at random: draws follow q, shapes ignore values, and the draft model's source draws when a request asks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.draws import Draws, draw_log_prob
from treeserve_core.noise import UniformStream, uniforms
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.model import LlamaModel
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.growth import GrowthLimits, TreeGrowth, best_children, draw_children
from treeserve_speculator.sources.ssm import SsmLimits, SsmSource

WARM = SamplingParams(temperature=0.8, seed=11)
LIMITS = GrowthLimits(max_nodes=8, max_depth=3, width=4, min_probability=0.03)


def logits(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


class TestDrawChildren:
    @pytest.mark.parametrize("size", [5, 64, 500])
    def test_q_is_the_top_of_the_softmax_at_the_requests_temperature(self, size: int) -> None:
        row = logits(size)
        draws = draw_children(row, WARM, 9, 4)
        top = np.sort(np.argsort(-row)[:64])
        expected = np.exp(row[top].astype(np.float64) / 0.8)
        assert sorted(draws.support) == top.tolist()
        q = dict(zip(draws.support, draws.probabilities, strict=True))
        assert [q[int(i)] for i in top] == pytest.approx(expected / expected.sum(), rel=1e-6)
        assert len(draws.token_ids) == 4

    def test_weights_survive_the_wire_unchanged(self) -> None:
        draws = draw_children(logits(200), WARM, 9, 4)
        assert draws.weights == tuple(float(np.float32(weight)) for weight in draws.weights)

    def test_draws_follow_q_and_are_independent(self) -> None:
        row = logits(4, seed=3)
        pairs = np.zeros((4, 4))
        for position in range(4000):
            pairs[draw_children(row, WARM, position, 2).token_ids] += 1
        draws = draw_children(row, WARM, 0, 1)
        q = np.zeros(4)
        q[list(draws.support)] = draws.probabilities
        assert stats.chisquare(pairs.ravel(), np.outer(q, q).ravel() * 4000).pvalue > 1e-3

    def test_they_are_the_same_again_and_not_the_verifiers(self) -> None:
        row = np.zeros(64, np.float32)
        drawn = [draw_children(row, WARM, position, 1).token_ids[0] for position in range(300)]
        assert drawn == [draw_children(row, WARM, position, 1).token_ids[0] for position in range(300)]
        verifiers = [int(uniforms(11, position, UniformStream.VERIFIER, 1)[0] * 64) for position in range(300)]
        assert np.mean(np.array(drawn) == verifiers) < 0.08

    def test_an_extreme_temperature(self) -> None:
        draws = draw_children(logits(100), SamplingParams(temperature=1e-4, seed=1), 0, 4)
        assert set(draws.token_ids) == {int(np.argmax(logits(100)))}


class TestGrowth:
    def grown(self, values: tuple[int, ...]) -> TreeGrowth:
        growth = TreeGrowth(1, LIMITS, frozenset({9}))
        assert growth.next_level() == [0]
        growth.expand_by(0, Draws(values, (5, 6, 7, 9), (0.7, 0.1, 0.1, 0.1)))
        return growth

    def test_how_many_draws_depends_on_the_place_alone(self) -> None:
        for values in itertools.product((5, 6, 7), repeat=3):
            growth = self.grown(values)
            first = growth.child(0, values[0])
            assert first is not None
            assert growth.num_draws(0, 4) == 4
            assert growth.num_draws(first, 4) == sum(
                draw_log_prob(0) + draw_log_prob(rank) >= math.log(0.03) for rank in range(4)
            )

    def test_children_are_ranked_by_their_first_draw(self) -> None:
        tree = self.grown((6, 5, 6, 5)).tree()
        assert tree.token_ids == (1, 6, 5)
        assert tree.log_probs == (0.0, draw_log_prob(0), draw_log_prob(1))
        assert tree.draws is not None and tree.draws[0] is not None and tree.draws[0].token_ids == (6, 5, 6, 5)

    def test_nothing_is_drawn_below_the_end(self) -> None:
        growth = self.grown((9, 5))
        assert [growth.token_ids[node] for node in growth.next_level()] == [5]

    def test_one_draw_at_least(self) -> None:
        growth = TreeGrowth(1, GrowthLimits(8, 3, 4, min_probability=0.9), frozenset())
        assert growth.num_draws(0, 4) == 1


class TestSsm:
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: Path) -> LlamaModel:
        torch.set_num_threads(1)
        return LlamaModel.load(tiny_model, load_config(tiny_model), torch.float32, torch.device("cpu"))

    def proposed(self, model: LlamaModel, rule: AcceptanceRule, sampling: SamplingParams, budget: int = 8) -> TokenTree:
        runner = ModelRunner(model, num_blocks=64, block_size=4)
        source = SsmSource(runner, SsmLimits(280, 512, depth=4, width=3, min_probability=0.01), frozenset())
        state = DraftSequence(1, [50, 60, 70], 3, sampling, budget, acceptance=rule)
        source.open(state)
        tree = source.propose(state, budget)
        assert tree is not None
        source.close(state)
        runner.blocks.check_integrity()
        return tree

    def test_only_multi_step_at_a_temperature_draws(self, model: LlamaModel) -> None:
        drawn = self.proposed(model, AcceptanceRule.MULTI_STEP, WARM)
        assert drawn.draws is not None and drawn.draws[0] is not None and max(drawn.depths) > 1
        assert len(drawn) - 1 + drawn.repeated_draws <= 8
        for rule, sampling in [
            (AcceptanceRule.REPLAY, WARM),
            (AcceptanceRule.TYPICAL, WARM),
            (AcceptanceRule.MULTI_STEP, SamplingParams()),
        ]:
            assert self.proposed(model, rule, sampling).draws is None

    def test_draws_are_those_of_the_models_logits(self, model: LlamaModel) -> None:
        tree = self.proposed(model, AcceptanceRule.MULTI_STEP, WARM)
        runner = ModelRunner(model, num_blocks=64, block_size=4)
        for node, draws in enumerate(tree.draws or ()):
            if draws is None:
                continue
            tokens = [50, 60, 70, *(tree.token_ids[i] for i in tree.path(node))]
            row = _logits(runner, tokens)[:280]
            expected = draw_children(row, WARM, len(tokens), 3)
            assert draws.token_ids == expected.token_ids[: len(draws.token_ids)]
            assert dict(zip(draws.support, draws.weights, strict=True)) == pytest.approx(
                dict(zip(expected.support, expected.weights, strict=True)), rel=1e-4
            )

    def test_typical_proposes_what_is_probable_and_is_not_coupled(self, model: LlamaModel) -> None:
        typical = self.proposed(model, AcceptanceRule.TYPICAL, WARM)
        row = _logits(ModelRunner(model, num_blocks=64, block_size=4), [50, 60, 70])[:280]
        top = best_children(row, SamplingParams(), 3, 3)[0]
        assert [typical.token_ids[c] for c in typical.children[0]] == top[: len(typical.children[0])]
        assert typical != self.proposed(model, AcceptanceRule.REPLAY, WARM)


def _logits(runner: ModelRunner, tokens: list[int]) -> np.ndarray:
    runner.blocks.add(0)
    runner.blocks.reserve(0, len(tokens))
    (rows,) = runner.forward([SequenceRows.from_chain(0, tokens, logits_rows=[len(tokens) - 1])])
    row = np.array(rows[0])
    runner.blocks.rollback(0)
    runner.blocks.free(0)
    return row
