"""Work of a verifier: what steps would cost if it were full, whatever they took."""

from __future__ import annotations

import pytest
from support.sequences import make_sequence

from treeserve_core.outcome import VerifyOutcome
from treeserve_core.sampling import SequenceLimits
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.executor import StepResult
from treeserve_verifier.load import Load
from treeserve_verifier.step_plan import Candidate
from treeserve_verifier.work import WorkMeter

# 10 ms and 1 ms for each row, in measured counts of rows.
COST = CostModel({rows: 10.0 + rows for rows in (1, 4, 8, 16, 32)}, prefill_row_ms=0.5, attend_ms=0.01)


def decoded(tokens: int, tpot_ms: float | None = None, ttft_ms: float | None = None) -> StepResult:
    sequence = make_sequence(limits=SequenceLimits(tpot_ms=tpot_ms, ttft_ms=ttft_ms))
    return StepResult(Candidate(sequence, 1).planned(), VerifyOutcome((), (7,) * tokens, None))


def prefilled(rows: int, context: int = 0, ttft_ms: float | None = None) -> StepResult:
    sequence = make_sequence(range(context + rows + 1), limits=SequenceLimits(ttft_ms=ttft_ms))
    return StepResult(Candidate(sequence, rows + 1).chunk(rows))


def work_ms(*results: StepResult, capacity: int = 32) -> float:
    meter = WorkMeter(COST)
    meter.did(results, capacity)
    return 1e3 * meter.work_s


def test_a_token_costs_its_share_of_the_largest_step() -> None:
    assert work_ms(decoded(1)) == pytest.approx(42 / 32)
    assert work_ms(decoded(3)) == pytest.approx(3 * 42 / 32)


def test_a_token_that_is_due_soon_costs_its_share_of_a_short_step() -> None:
    assert work_ms(decoded(1, tpot_ms=28.0)) == pytest.approx(18 / 8 / 0.8)  # 26 ms are too long, 18 of 25 are not
    assert work_ms(decoded(1, tpot_ms=1.0)) == pytest.approx(11 / 0.8)  # no step is short enough


def test_the_places_and_the_kv_cache_bound_the_step() -> None:
    assert work_ms(decoded(1), capacity=4) == pytest.approx(14 / 4)


def test_a_place_more_makes_nothing_dearer() -> None:
    assert work_ms(decoded(1), capacity=17) == pytest.approx(26 / 16)  # 17 rows cost as much as 32


def test_how_many_share_a_step_changes_nothing() -> None:
    results = [decoded(1, tpot_ms=tpot_ms) for tpot_ms in (None, 30.0, 100.0)]
    assert work_ms(*results) == pytest.approx(sum(work_ms(result) for result in results))


def test_a_prompt_costs_what_it_lengthens_steps_by() -> None:
    assert work_ms(prefilled(16)) == pytest.approx(16 * 0.5 + 16 * 8 * 0.01)
    assert work_ms(prefilled(16, context=100)) == pytest.approx(16 * 0.5 + 16 * 108 * 0.01)


def test_what_was_promised_leaves_room() -> None:
    assert work_ms(prefilled(16, ttft_ms=500.0)) == pytest.approx(work_ms(prefilled(16)) / 0.8)
    assert work_ms(decoded(1, ttft_ms=500.0)) == pytest.approx(work_ms(decoded(1)) / 0.8)


def test_work_is_told_by_the_second() -> None:
    before = Load(1, 640, 0, False, work_s=10.0, drafting_s=5.0)
    assert before.resembles(Load(1, 640, 0, False, work_s=10.9, drafting_s=5.9), few_blocks=4)
    assert not before.resembles(Load(1, 640, 0, False, work_s=11.1, drafting_s=5.0), few_blocks=4)
    assert not before.resembles(Load(1, 640, 0, False, work_s=10.0, drafting_s=6.1), few_blocks=4)
