"""What the latency model predicts, and how it learns."""

from __future__ import annotations

import random

import pytest

from treeserve_core.sampling import ServiceClass
from treeserve_router.latency_model import Latency, LatencyModel

STANDARD, BATCH = ServiceClass.STANDARD, ServiceClass.BATCH


def test_nothing_is_predicted_from_nothing() -> None:
    assert LatencyModel().now().ttft_s(100, STANDARD) is None
    assert LatencyModel().now().token_s is None


def test_a_verifiers_own_figures_are_believed_at_first() -> None:
    model = LatencyModel()
    model.reported(0.01, 1000)
    assert model.now() == Latency(step_s=0.01, prefill_tokens_per_s=1000)
    assert model.now().ttft_s(500, STANDARD) == pytest.approx(0.51)
    assert model.now().token_s == 0.01
    model.reported(0.0, 0.0)
    assert model.now().ttft_s(500, STANDARD) == pytest.approx(0.51)


@pytest.mark.parametrize(("overhead_s", "slowness"), [(0.05, 1.0), (0.0, 3.0), (0.03, 0.5)])
def test_overhead_and_slowness_are_told_apart(overhead_s: float, slowness: float) -> None:
    model, rng = LatencyModel(), random.Random(1)
    model.reported(0.01, 1000)
    for _ in range(200):
        tokens = rng.randrange(10, 2000)
        model.first_token(STANDARD, tokens, 0.01 + overhead_s + slowness * tokens / 1000 + rng.gauss(0, 0.005))
    for tokens in (10, 300, 3000):
        truth = 0.01 + overhead_s + slowness * tokens / 1000
        assert model.now().ttft_s(tokens, STANDARD) == pytest.approx(truth, rel=0.1, abs=0.02)


def test_short_prompts_say_nothing_about_long_ones() -> None:
    model = LatencyModel()
    model.reported(0.005, 3000)
    for _ in range(100):
        model.first_token(STANDARD, 9, 0.035)  # ten times what its prefill takes
    assert model.now().ttft_s(9, STANDARD) == pytest.approx(0.035, rel=0.15)
    assert model.now().ttft_s(3000, STANDARD) == pytest.approx(1.03, rel=0.1)


def test_it_follows_a_verifier_that_becomes_slow_and_recovers() -> None:
    model = LatencyModel()
    model.reported(0.01, 1000)
    for slowness in (1.0, 4.0, 1.0):
        for _ in range(100):
            model.first_token(STANDARD, 500, 0.01 + slowness * 0.5)
        assert model.now().ttft_s(500, STANDARD) == pytest.approx(0.01 + slowness * 0.5, rel=0.1)


def test_classes_learn_by_themselves() -> None:
    model = LatencyModel()
    model.reported(0.01, 1000)
    for _ in range(100):
        model.first_token(STANDARD, 500, 0.51)
        model.first_token(BATCH, 500, 2.51)
    assert model.now().ttft_s(500, STANDARD) == pytest.approx(0.51, rel=0.05)
    assert model.now().ttft_s(500, BATCH) == pytest.approx(2.51, rel=0.05)


def test_a_pause_is_not_slowness() -> None:
    model = LatencyModel()
    model.reported(0.01, 1000)
    for took_s in (0.11, 0.11, 30.0, 0.11, 0.11):
        model.first_token(STANDARD, 100, took_s)
    assert model.now().ttft_s(100, STANDARD) == pytest.approx(0.11, abs=0.05)


def test_time_per_token_is_smoothed_over_sequences() -> None:
    model = LatencyModel()
    model.reported(0.05, 1000)
    model.ended(0, 0.0)
    assert model.now().token_s == 0.05
    model.ended(100, 2.0)
    assert model.now().token_s == pytest.approx(0.02)
    for _ in range(50):
        model.ended(100, 1.0)
    assert model.now().token_s == pytest.approx(0.01, rel=0.02)
