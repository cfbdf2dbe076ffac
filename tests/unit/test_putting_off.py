"""Sequences that have time to spare leave their rows to prompts that have none, and nobody is late by it."""

from __future__ import annotations

import math

from support.sequences import make_config, make_sequence
from support.virtual_verifier import VirtualVerifier

from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import Candidate, StepPlan

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass
COST = CostModel({1: 5.0, 4: 5.5, 8: 7.0, 16: 10.0, 32: 17.0}, prefill_row_ms=0.3)
PROMPT = make_sequence(range(1, 101), limits=SequenceLimits(INTERACTIVE, ttft_ms=400))


def planned(decoding: list[Candidate], prompt_slack_ms: float, **config: int) -> tuple[StepPlan, int]:
    """The plan, and how many rows of the prompt of 100 tokens are in it."""
    planner = StepPlanner(make_config(step_rows=256, prefill_rows=128, **config), COST)
    plan = planner.plan([*decoding, Candidate(PROMPT, 100, slack_ms=prompt_slack_ms)])
    return plan, sum(p.rows for p in plan.sequences if p.sequence is PROMPT)


def decoding(count: int, slack_ms: float, tpot_ms: float | None, service_class: ServiceClass) -> list[Candidate]:
    sequences = [
        make_sequence(max_tokens=500, limits=SequenceLimits(service_class, tpot_ms=tpot_ms)) for _ in range(count)
    ]
    return [Candidate(sequence, 1, slack_ms=slack_ms) for sequence in sequences]


TIGHT = decoding(1, 20.0, 25.0, REALTIME)


def test_those_with_time_to_spare_leave_their_rows_to_a_prompt_that_has_none() -> None:
    patient = decoding(20, 80.0, 100.0, STANDARD)
    plan, rows = planned([*TIGHT, *patient], prompt_slack_ms=30.0)
    running = {p.sequence for p in plan.sequences}
    assert TIGHT[0].sequence in running
    assert plan.put_off and plan.put_off == {c.sequence for c in patient} - running
    hurried, _ = planned([*TIGHT, *decoding(20, 25.0, 100.0, STANDARD)], prompt_slack_ms=30.0)
    assert not hurried.put_off, "those who have none to spare are not"
    assert rows > 1.5 * sum(p.rows for p in hurried.sequences if p.sequence is PROMPT)


def test_they_go_on_while_the_prompt_can_wait() -> None:
    patient = decoding(8, 80.0, 100.0, STANDARD)
    plan, _ = planned([*TIGHT, *patient], prompt_slack_ms=5000.0)
    assert not plan.put_off


def test_beside_a_realtime_sequence_more_are_left_out() -> None:
    """Steps are to be short there, and the prompt gets more of them."""

    def put_off(service_class: ServiceClass) -> int:
        others = [*decoding(1, 35.0, 25.0, service_class), *decoding(20, 80.0, 100.0, STANDARD)]
        plan, _ = planned(others, prompt_slack_ms=30.0)
        return len(plan.put_off)

    assert put_off(REALTIME) > put_off(INTERACTIVE)


def test_nobody_leaves_its_rows_to_prompts_of_a_less_urgent_class() -> None:
    plan, _ = planned([*TIGHT, *decoding(8, 80.0, 100.0, REALTIME)], prompt_slack_ms=10.0)
    assert not plan.put_off


def test_who_was_promised_nothing_waits_no_longer_than_the_longest_gap() -> None:
    fresh = decoding(20, math.inf, None, BATCH)
    plan, _ = planned([*TIGHT, *fresh], prompt_slack_ms=10.0)
    assert plan.put_off
    silent = [Candidate(c.sequence, 1, silent_ms=80.0) for c in fresh]
    plan, _ = planned([*TIGHT, *silent], prompt_slack_ms=10.0)
    assert not plan.put_off


def test_as_many_go_on_in_each_step_as_it_takes_on_average() -> None:
    """If all waited as long as they can, all would come in one step, and the tight one would be late."""
    alike = decoding(20, 80.0, 50.0, STANDARD)
    plan, _ = planned([*TIGHT, *alike], prompt_slack_ms=10.0)
    kept = len(alike) - len(plan.put_off)
    assert 20 * 20.0 / (TPOT_SHARE * 50.0) <= kept < 20, "steps take 20 ms, and each needs a token every 40"


def test_to_be_put_off_is_no_waiting() -> None:
    """Else it would make a sequence more urgent that is in time."""
    verifier = VirtualVerifier(max_sequences=32)
    patient = [verifier.submit(16, 400, tpot_ms=120) for _ in range(12)]
    verifier.run(lambda: all(len(verifier.emitted[s]) > 40 for s in patient))
    waited = [s.wait.so_far(verifier.now) for s in patient]
    tight = verifier.submit(8, 400, REALTIME, tpot_ms=15)
    verifier.run(lambda: len(verifier.emitted[tight]) > 1)
    before = len(verifier.plans)
    for _ in range(10):
        verifier.submit(200, 4, REALTIME, ttft_ms=70)
        verifier.step()
    put_off = {s for plan in verifier.plans[before:] for s in plan.put_off}
    assert put_off & set(patient)
    assert [s.wait.so_far(verifier.now) for s in patient] == waited


def test_all_targets_are_kept_where_there_is_room_for_all() -> None:
    verifier = VirtualVerifier(max_sequences=40)
    slow = [verifier.submit(16, 60, BATCH, tpot_ms=150) for _ in range(16)]
    verifier.run(lambda: all(verifier.emitted[s] for s in slow))
    quick: list[Sequence] = []
    for _ in range(12):
        quick.append(verifier.submit(60, 12, REALTIME, ttft_ms=150, tpot_ms=22))
        until = verifier.now + 0.12
        verifier.run(lambda until=until: verifier.now >= until or len(verifier.scheduler) == 0)
    verifier.run_all()
    assert any(plan.put_off for plan in verifier.plans)
    assert all(s.promise.met_ttft and s.promise.met_tpot for s in quick)
    assert all(s.promise.met_tpot for s in slow)
    assert max(gap for s in slow for gap in verifier.gaps_ms(s)) <= verifier.config.max_decode_gap_ms


def test_a_promise_is_not_lost_while_the_whole_target_can_be_met() -> None:
    """Plans use a share of a target only; who is slower than that, but in time, still holds up prompts."""

    def rows(tpot_ms: float) -> int:
        return planned(decoding(8, 0.0, tpot_ms, INTERACTIVE), prompt_slack_ms=10.0)[1]

    assert rows(6.9) == 100, "a step takes 7 ms"
    assert rows(7.0 / TPOT_SHARE - 0.5) == 16
