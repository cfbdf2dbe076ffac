"""Multi-step acceptance through the sampler: seeds, ends, penalties, log-probabilities, and greedy requests."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.outcome import FinishReason, VerifyOutcome
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.next_token import NonFiniteLogitsError, next_token, target_distribution
from treeserve_engine.processors import TokenContext

VOCAB, PADDED, EOS = 6, 9, 5
RULE = Acceptance(AcceptanceRule.MULTI_STEP)
Q = Draws((1, 2, 1), (0, 1, 2, 3), (0.1, 0.4, 0.3, 0.2))
TREE = TokenTree((0, 1, 2, 3), (-1, 0, 0, 1), draws=(Q, Draws((3,), (3, 4), (0.5, 0.5)), None, None))


def logits_of(*probabilities: float) -> npt.NDArray[np.float32]:
    row = np.full(PADDED, 50.0, np.float32)  # padding is the largest of all
    row[:VOCAB] = np.log(np.maximum([*probabilities, *[0.0] * (VOCAB - len(probabilities))], 1e-30))
    return row


def step(
    tree: TokenTree, row: npt.NDArray[np.float32], params: SamplingParams, generated: tuple[int, ...] = (), **stop: Any
) -> VerifyOutcome:
    sampler = SequenceSampler(
        params,
        StoppingCriteria(**{"max_tokens": 60, **stop}),
        (0,),
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        generated_token_ids=generated,
    )
    return accept(tree, lambda _: row, sampler, None, RULE)


def sampled(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, **fields)


FLAT = logits_of(0.2, 0.2, 0.2, 0.2, 0.1, 0.1)


def test_the_same_tree_and_seed_give_the_same_outcome_and_another_seed_does_not() -> None:
    outcomes = [step(TREE, FLAT, sampled(seed)) for seed in range(30)]
    assert outcomes == [step(TREE, FLAT, sampled(seed)) for seed in range(30)]
    assert len({outcome.token_ids for outcome in outcomes}) > 5
    here = [step(TokenTree.root_only(0), FLAT, sampled(), (0,) * n).token_ids for n in range(1, 30)]
    assert len(set(here)) == VOCAB, "each position has uniforms of its own"


def test_the_outcome_depends_on_the_tree() -> None:
    plain = [step(TokenTree.root_only(0), FLAT, sampled(seed)).token_ids[0] for seed in range(40)]
    assert plain != [step(TREE, FLAT, sampled(seed)).token_ids[0] for seed in range(40)]


def test_greedy_requests_are_replayed() -> None:
    for favourite in range(VOCAB):
        row = logits_of(*(0.9 if i == favourite else 0.02 for i in range(VOCAB)))
        greedy = step(TREE, row, SamplingParams())
        assert greedy.token_ids[0] == favourite
        assert (greedy.accepted_nodes != ()) == (favourite in (1, 2))


def test_what_the_target_excludes_is_never_emitted() -> None:
    params = [sampled(seed, top_k=2, logit_bias={3: 5.0}) for seed in range(60)]
    assert {token for p in params for token in step(TREE, FLAT, p).token_ids} <= {0, 3}
    blocked = [step(TREE, logits_of(0.1, 0.1, 0, 0, 0, 0.8), sampled(seed), min_tokens=9) for seed in range(60)]
    assert EOS not in {token for outcome in blocked for token in outcome.token_ids}


@pytest.mark.parametrize("kind", ["eos", "stop_token", "length"])
def test_ends(kind: str) -> None:
    row = logits_of(0, 1.0, 0, 0, 0, 0) if kind != "eos" else logits_of(0, 0, 0, 0, 0, 1.0)
    stop: dict[str, Any] = {"stop_token": {"stop_token_ids": (1,)}, "length": {"max_tokens": 1}}.get(kind, {})
    outcome = step(TREE, row, sampled(), **stop)
    assert outcome.token_ids == ((EOS,) if kind == "eos" else (1,))
    assert outcome.finish_reason == (FinishReason.LENGTH if kind == "length" else FinishReason.STOP)
    assert outcome.accepted_nodes == (() if kind == "eos" else (1,))


def test_penalties_see_the_path() -> None:
    """Once 1 was emitted it is all but excluded."""
    tree = TokenTree.chain([0, 1, 1])
    params = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 9.0}
    row = logits_of(0.05, 0.9, 0.05)
    again = Counter(step(tree, row, sampled(seed, **params)).token_ids[:2] for seed in range(100))
    free = Counter(step(tree, row, sampled(seed)).token_ids[:2] for seed in range(100))
    assert free[1, 1] > 60 and again[1, 1] < 30


def test_log_probs_are_the_models_own() -> None:
    outcome = step(TREE, logits_of(0.1, 0.8, 0.1), SamplingParams(temperature=3.0, seed=2, top_log_probs=1))
    assert len(outcome.log_probs) == len(outcome.token_ids)
    for entry in outcome.log_probs:
        assert entry.log_prob == pytest.approx(math.log({0: 0.1, 1: 0.8, 2: 0.1}[entry.token_id]), abs=1e-5)


def test_logits_that_are_not_finite_are_refused() -> None:
    row = FLAT.copy()
    row[2] = np.nan
    with pytest.raises(NonFiniteLogitsError):
        step(TREE, row, sampled())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 4, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {3: 2.0}},
    ],
)
def test_the_distribution_is_the_one_that_next_token_draws_from(params: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 8).astype(np.float32)
    context = TokenContext([0, 1], [2, 2, 3])
    p = target_distribution(logits, SamplingParams(**{"temperature": 1.0, **params}), context, (7,))
    assert p.sum() == pytest.approx(1.0, abs=1e-15) and p[7] == 0.0
    draws = Counter(
        next_token(logits, SamplingParams(**{"temperature": 1.0, **params}, seed=seed), context, 9, (7,))
        for seed in range(3000)
    )
    assert set(draws) <= set(np.flatnonzero(p).tolist())
    frequencies = np.array([draws[i] / 3000 for i in range(8)])
    assert np.abs(frequencies - p).max() < 0.03
