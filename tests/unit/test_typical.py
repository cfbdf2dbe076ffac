"""Typical acceptance against its definition, written down path by path, and through the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.outcome import FinishReason
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.typical import is_accepted, longest_path

VOCAB, EOS = 6, 5
TYPICAL = Acceptance(AcceptanceRule.TYPICAL)
WARM = SamplingParams(temperature=1.0, seed=4)
Distributions = Callable[[int, tuple[int, ...]], npt.NDArray[np.float64]]


def random_tree(rng: np.random.Generator) -> TokenTree:
    token_ids, parents, taken = [0], [-1], set()
    for _ in range(int(rng.integers(1, 14))):
        parent, token_id = int(rng.integers(len(token_ids))), int(rng.integers(VOCAB))
        if (parent, token_id) not in taken:
            taken.add((parent, token_id))
            token_ids.append(token_id)
            parents.append(parent)
    return TokenTree(tuple(token_ids), tuple(parents))


def random_rows(tree: TokenTree, rng: np.random.Generator) -> list[npt.NDArray[np.float32]]:
    return [rng.normal(0, rng.choice([0.3, 1.0, 2.5]), VOCAB).astype(np.float32) for _ in range(len(tree))]


def softmax(z: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    e = np.exp(z.astype(np.float64) - z.max())
    return np.asarray(e / e.sum())


def brute_force(
    tree: TokenTree, distributions: list[npt.NDArray[np.float64]], acceptance: Acceptance, end_ids: set[int], left: int
) -> tuple[int, ...]:
    """Every path of the tree, judged by the definition; the best one."""
    paths: list[tuple[int, float, int, tuple[int, ...]]] = [(0, 0.0, 0, ())]
    for leaf in range(1, len(tree)):
        nodes = tree.path(leaf)
        tokens = tuple(tree.token_ids[n] for n in nodes)
        accepted, log_prob = len(nodes) <= left and not end_ids & set(tokens[:-1]), 0.0
        for i, (node, token_id) in enumerate(zip(nodes, tokens, strict=True)):
            p = distributions[tree.parents[node]].tolist()
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            typical = p[token_id] > min(acceptance.epsilon, acceptance.delta * math.exp(-entropy))
            accepted &= token_id == p.index(max(p)) or (typical and i > 0)
            log_prob += math.log(p[token_id]) if p[token_id] > 0 else -math.inf
        if accepted:
            paths.append((len(nodes), log_prob, -leaf, tokens))
    return max(paths)[3]


@pytest.mark.parametrize("epsilon", [0.02, 0.09, 0.5])
@pytest.mark.parametrize("delta", [0.05, 0.3, 1.0])
def test_the_path_is_the_one_that_the_definition_names(epsilon: float, delta: float) -> None:
    rng = np.random.default_rng(3)
    acceptance = Acceptance(AcceptanceRule.TYPICAL, epsilon, delta)
    lengths = []
    for _ in range(150):
        tree = random_tree(rng)
        distributions = [softmax(row) for row in random_rows(tree, rng)]
        left = int(rng.integers(1, 6))
        found = longest_path(
            tree,
            lambda node, path: distributions[node],  # noqa: B023
            lambda token_id, ahead: token_id == EOS or ahead + 1 >= left,  # noqa: B023
            acceptance,
        )
        assert found == brute_force(tree, distributions, acceptance, {EOS}, left)
        lengths.append(len(found))
    assert max(lengths) >= 3 and min(lengths) == 0


def sampler(params: SamplingParams = WARM, **stopping: Any) -> SequenceSampler:
    criteria = StoppingCriteria(**{"max_tokens": 50, **stopping})
    return SequenceSampler(params, criteria, (0,), eos_token_ids=(EOS,), vocab_size=VOCAB)


def favour(*probabilities: float) -> npt.NDArray[np.float32]:
    p = np.array([*probabilities, *[0.0] * (VOCAB - len(probabilities))])
    return np.log(np.maximum(p, 1e-12)).astype(np.float32)


def test_a_step_is_greedy_then_typical_then_greedy() -> None:
    rows = [favour(0.1, 0.5, 0.4), favour(0.5, 0.3, 0.2), favour(0.2, 0.2, 0.6), favour(0.9, 0.1)]
    assert accept(TokenTree((0, 2), (-1, 0)), rows.__getitem__, sampler(), None, TYPICAL).token_ids == (1,)
    tree = TokenTree.chain([0, 1, 2, 1])
    outcome = accept(tree, rows.__getitem__, sampler(), None, TYPICAL)
    assert outcome.token_ids == (1, 2, 1, 0) and outcome.accepted_nodes == (1, 2, 3)
    assert accept(tree, rows.__getitem__, sampler(), None, Acceptance()).token_ids != outcome.token_ids


def test_more_uncertainty_lets_less_probable_tokens_pass() -> None:
    flat, sharp = np.full(VOCAB, 1 / VOCAB), np.array([0.95, 0.01, 0.01, 0.01, 0.01, 0.01])
    assert is_accepted(flat, TYPICAL, first=False).all()
    assert is_accepted(sharp, TYPICAL, first=False).tolist() == [True, *[False] * 5]
    assert is_accepted(flat, TYPICAL, first=True).sum() == 1


def test_at_temperature_0_it_is_replay() -> None:
    rng = np.random.default_rng(8)
    for _ in range(60):
        tree = random_tree(rng)
        rows = random_rows(tree, rng)
        greedy = [accept(tree, rows.__getitem__, sampler(SamplingParams()), None, a) for a in (None, TYPICAL)]
        assert greedy[0] == greedy[1]


def test_what_ends_the_generation_ends_the_path() -> None:
    rows = [favour(0.2, 0.8), favour(0.3, 0.2, 0.1, 0.1, 0.1, 0.2), favour(1.0), favour(1.0)]
    tree = TokenTree((0, 1, EOS, 0), (-1, 0, 1, 2))
    outcome = accept(tree, rows.__getitem__, sampler(), None, TYPICAL)
    assert (outcome.token_ids, outcome.finish_reason) == ((1, EOS), FinishReason.STOP)
    blocked = accept(tree, rows.__getitem__, sampler(min_tokens=2), None, TYPICAL)
    assert blocked.token_ids == (1, 0), "the end of sequence has no probability yet"
    short = accept(tree, rows.__getitem__, sampler(max_tokens=1), None, TYPICAL)
    assert (short.token_ids, short.finish_reason) == ((1,), FinishReason.LENGTH)
    stopped = accept(
        TokenTree.chain([0, 1, 0, 0]), rows.__getitem__, sampler(), lambda token_id: token_id == 1, TYPICAL
    )
    assert (stopped.token_ids, stopped.finish_reason) == ((1,), FinishReason.STOP)


def test_penalties_look_at_each_path_for_itself() -> None:
    """After 1 the second 1 is penalised below the threshold; after 2 it is not."""
    params = SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=2.0)
    favourite = favour(0.02, 0.49, 0.48, 0.01)
    chain = TokenTree.chain([0, 1, 1])
    assert accept(chain, lambda node: favourite, sampler(params), None, TYPICAL).token_ids == (1, 2)
    chain = TokenTree.chain([0, 1, 2])
    assert accept(chain, lambda node: favourite, sampler(params), None, TYPICAL).token_ids[:2] == (1, 2)
    plain = accept(TokenTree.chain([0, 1, 1]), lambda node: favourite, sampler(), None, TYPICAL)
    assert plain.token_ids[:2] == (1, 1)


def test_log_probs_are_the_models_own() -> None:
    rows = [favour(0.1, 0.5, 0.4), favour(0.5, 0.3, 0.2)]
    params = SamplingParams(temperature=2.0, top_log_probs=1)
    outcome = accept(TokenTree.chain([0, 1]), rows.__getitem__, sampler(params), None, TYPICAL)
    assert [entry.log_prob for entry in outcome.log_probs] == pytest.approx([math.log(0.5)] * 2, abs=1e-5)
