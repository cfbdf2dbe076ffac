"""Draws follow the softmax that the parameters define, over seeds as over positions; a wrong noise would show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from treeserve_core.noise import gumbel, uniform_counters
from treeserve_core.sampling import SamplingParams
from treeserve_engine import noisy_argmax as module
from treeserve_engine.next_token import next_token
from treeserve_engine.processors import TokenContext

VOCAB = 9
DRAWS = 2500
LOGITS = np.random.default_rng(5).normal(0, 1.3, VOCAB).astype(np.float32)
# Draws are a fixed function of seed and position: no flakes. A true distribution stays above, a wrong one far below.
PASS, REJECT = 1e-3, 1e-6

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all_filters": {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    "penalties_and_bias": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "logit_bias": {2: 1.0, 4: -0.5}},
}


def distribution(params: SamplingParams, context: TokenContext = TokenContext()) -> npt.NDArray[np.float64]:  # noqa: B008
    """What the parameters promise, written down without the sampler's shortcuts."""
    logits = LOGITS.astype(np.float64)
    for token_id, count in zip(*context.counts(), strict=True):
        if params.repetition_penalty != 1.0:
            positive = logits[token_id] > 0
            logits[token_id] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
        logits[token_id] -= params.presence_penalty * (count > 0)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    p = np.exp(logits / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        p[order[np.searchsorted(np.cumsum(p[order]), params.top_p) + 1 :]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def seeds_and_positions(kind: str) -> Iterable[tuple[int, int]]:
    if kind == "positions":
        return ((1234, position) for position in range(DRAWS))
    if kind == "seeds":
        return ((seed, 7) for seed in range(DRAWS))
    return ((seed * 2**32, 50 + seed % 61) for seed in range(DRAWS))


def p_value(
    expected: npt.NDArray[np.float64], draws: Iterable[tuple[int, int]], draw: Callable[[int, int], int]
) -> float:
    counts = np.bincount([draw(seed, position) for seed, position in draws], minlength=VOCAB)
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a filtered token was drawn"
    if kept.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[kept], expected[kept] * counts.sum()).pvalue)


def draw_with(params: dict[str, Any], context: TokenContext) -> Callable[[int, int], int]:
    return lambda seed, position: next_token(LOGITS, SamplingParams(**params, seed=seed), context, position)


@pytest.mark.parametrize("kind", ["positions", "seeds", "both"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_follow_the_distribution(variant: str, kind: str) -> None:
    params = {"temperature": 1.0, **VARIANTS[variant]}
    context = TokenContext([0, 2], [3, 3, 1])
    expected = distribution(SamplingParams(**params), context)
    assert (expected > 0).sum() >= 3, "the variant should leave something to draw"
    assert p_value(expected, seeds_and_positions(kind), draw_with(params, context)) > PASS


def test_neighbouring_positions_seeds_and_ids_are_independent() -> None:
    params = SamplingParams(temperature=2.0)
    table = np.zeros((3, 3, 3))
    logits = np.zeros(3, np.float32)
    for step in range(2500):
        here = next_token(logits, params, TokenContext(), step)
        ahead = next_token(logits, params, TokenContext(), step + 1)
        beside = next_token(logits, SamplingParams(temperature=2.0, seed=1), TokenContext(), step)
        table[here, ahead, beside] += 1
    assert stats.chisquare(table.ravel()).pvalue > PASS


def test_the_noise_is_gumbel() -> None:
    noise = np.concatenate([gumbel(3, position, np.arange(500)) for position in range(60)])
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > PASS


class TestNegativeControls:
    """The same check rejects samplers that are wrong, so passing it means something."""

    def test_normal_noise_is_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def normal(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            noise: npt.NDArray[np.float64] = stats.norm.ppf(uniform_counters(seed, position, ids) * 2.0**-53)
            return noise

        monkeypatch.setattr(module, "native_sampling", lambda: None)
        monkeypatch.setattr(module, "gumbel", normal)
        monkeypatch.setattr(module, "_CUT", 0.0)  # no pruning: the bound is that of Gumbel noise
        draw = draw_with({"temperature": 1.0}, TokenContext())
        expected = distribution(SamplingParams(temperature=1.0))
        assert p_value(expected, seeds_and_positions("both"), draw) < REJECT

    def test_reused_noise_is_rejected(self) -> None:
        """One uniform draw for the whole generation."""
        draw = draw_with({"temperature": 1.0}, TokenContext())
        expected = distribution(SamplingParams(temperature=1.0))
        assert p_value(expected, ((1, 1) for _ in range(DRAWS)), draw) < REJECT

    def test_an_ignored_temperature_is_rejected(self) -> None:
        draw = draw_with({"temperature": 1.0}, TokenContext())
        expected = distribution(SamplingParams(temperature=1.3))
        assert p_value(expected, seeds_and_positions("both"), draw) < REJECT

    def test_an_ignored_penalty_is_rejected(self) -> None:
        draw = draw_with({"temperature": 1.0}, TokenContext())
        expected = distribution(SamplingParams(temperature=1.0, repetition_penalty=2.0), TokenContext([0, 1, 2]))
        assert p_value(expected, seeds_and_positions("both"), draw) < REJECT
