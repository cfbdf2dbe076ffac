"""When tokens are due, whether targets were met, how waiting adds up, and which loads are worth a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treeserve_verifier.load import Load, SpeedMeter
from treeserve_verifier.promise import TPOT_SHARE, Promise
from treeserve_verifier.sequence import WaitTime


def test_the_first_token_is_due_by_the_arrival_and_later_ones_by_the_first() -> None:
    promise = Promise(ttft_ms=500, tpot_ms=100, asked_at=10.0)
    assert promise.due_at == 10.5
    promise.emitted(1, 10.4)
    assert promise.due_at == pytest.approx(10.4 + TPOT_SHARE * 0.1)
    promise.emitted(3, 10.5)
    assert promise.due_at == pytest.approx(10.4 + TPOT_SHARE * 0.4), "three tokens at once buy time"
    assert Promise(tpot_ms=100).due_at is None
    unpromised = Promise(ttft_ms=500)
    unpromised.emitted(1, 0.1)
    assert unpromised.due_at is None


def test_targets_are_judged_without_margin_and_only_where_there_are_any() -> None:
    promise = Promise(ttft_ms=500, tpot_ms=100, asked_at=10.0)
    assert promise.met_ttft is None and promise.met_tpot is None
    promise.emitted(1, 10.5)
    assert promise.met_ttft is True and promise.met_tpot is None
    promise.emitted(2, 10.7)
    assert promise.met_tpot is True
    promise.emitted(1, 10.9)
    assert promise.met_tpot is False
    late = Promise(ttft_ms=500, asked_at=10.0)
    late.emitted(5, 10.6)
    assert late.met_ttft is False and late.met_tpot is None


def test_waiting_adds_up_over_spells() -> None:
    wait = WaitTime()
    wait.begin(1.0)
    wait.begin(2.0)
    assert wait.so_far(4.0) == 3.0
    wait.end(5.0)
    assert wait.so_far(100.0) == 4.0
    wait.end(200.0)
    wait.begin(300.0)
    assert wait.so_far(301.0) == 5.0


def test_small_changes_of_the_load_are_not_worth_a_report() -> None:
    told = Load(sequences=4, free_blocks=100, speculators=1, draining=False, step_ms=10.0, prefill_tokens_per_s=1000.0)
    similar = replace(told, free_blocks=98, step_ms=11.0, prefill_tokens_per_s=900.0)
    assert told.resembles(similar, few_blocks=2) and similar.resembles(told, few_blocks=2)
    for change in (
        {"sequences": 5},
        {"waiting": 1},
        {"preemptible": 1},
        {"draining": True},
        {"free_blocks": 97},
        {"step_ms": 13.0},
        {"prefill_tokens_per_s": 0.0},
    ):
        assert not told.resembles(replace(told, **change), few_blocks=2), change


def test_the_rate_of_prefill_is_that_of_steps_that_have_some() -> None:
    meter = SpeedMeter()
    assert meter.step_ms == meter.prefill_tokens_per_s == 0.0
    meter.observe(0, 5.0)
    assert meter.step_ms == 5.0 and meter.prefill_tokens_per_s == 0.0
    meter.observe(100, 50.0)
    assert meter.prefill_tokens_per_s == pytest.approx(2000.0)
    for _ in range(100):
        meter.observe(0, 5.0)
    assert meter.step_ms == pytest.approx(5.0, rel=0.01) and meter.prefill_tokens_per_s == pytest.approx(2000.0)
    for _ in range(100):
        meter.observe(50, 50.0)
    assert meter.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.01)
