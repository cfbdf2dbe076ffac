"""Prompts beside decoding sequences: how long the latter wait at most, and whose prompt comes first."""

from __future__ import annotations

import math

import pytest
from support.sequences import make_config, make_sequence
from support.virtual_verifier import VirtualVerifier

from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_core.tree import TokenTree
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import Candidate, StepPlan

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass
LONG = 4000


def decoding(verifier: VirtualVerifier, count: int, max_tokens: int = 500, **limits: object) -> list[Sequence]:
    sequences = [verifier.submit(16, max_tokens, **limits) for _ in range(count)]
    verifier.run(lambda: all(verifier.emitted[s] for s in sequences))
    return sequences


@pytest.mark.parametrize("gap_ms", [30.0, 60.0, 100.0])
def test_a_long_prompt_keeps_nobody_waiting_for_longer_than_the_bound(gap_ms: float) -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=gap_ms, prefill_rows=256)
    running = decoding(verifier, 6)
    long = verifier.submit(LONG, 4)
    verifier.run(lambda: bool(verifier.emitted[long]))
    gaps = [gap for s in running for gap in verifier.gaps_ms(s)]
    assert max(gaps) <= gap_ms + 1e-6
    assert max(gaps) > 0.9 * gap_ms, "and the prompt gets what the bound leaves"


def test_later_chunks_of_a_long_prompt_are_smaller_because_they_attend_to_more() -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=60.0, prefill_rows=256)
    decoding(verifier, 2)
    long = verifier.submit(LONG, 4)
    verifier.run(lambda: bool(verifier.emitted[long]))
    chunks = chunks_of(verifier, long)
    assert chunks == sorted(chunks, reverse=True) and chunks[0] > 2 * chunks[-1]


def test_a_prompt_lengthens_steps_only_as_far_as_promises_allow() -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=500.0, prefill_rows=256)
    promised = decoding(verifier, 4, tpot_ms=20)
    long = verifier.submit(LONG, 4)
    verifier.run(lambda: bool(verifier.emitted[long]))
    verifier.run_all()
    assert all(s.promise.met_tpot for s in promised)
    chunks = set(chunks_of(verifier, long))
    assert len(chunks) > 3 and max(chunks) == 40, "and takes all of that"


@pytest.mark.parametrize(
    ("slack_ms", "rows"),
    [
        (100.0, 64),  # all of it
        (11.0, 20),  # as far as the realtime one is in time
        (9.0, 13),
        (6.0, 8),  # it will be late even so
        (-3.0, 8),
    ],
)
def test_a_prompt_gets_fewer_rows_in_any_case_beside_a_realtime_sequence(slack_ms: float, rows: int) -> None:
    cost = CostModel({1: 5.0, 64: 5.0}, prefill_row_ms=0.3)
    realtime = make_sequence(max_tokens=500, limits=SequenceLimits(REALTIME, tpot_ms=20.0))
    prompts = [make_sequence(range(64), limits=SequenceLimits(STANDARD)) for _ in range(2)]
    candidates = [Candidate(realtime, 1, slack_ms=slack_ms), *(Candidate(prompt, 64) for prompt in prompts)]
    plan = StepPlanner(make_config(step_rows=256, prefill_rows=64), cost).plan(candidates)
    assert [p.rows for p in plan.sequences if p.sequence is not realtime] == [rows], "all prompts together"


def test_a_realtime_prompt_gets_its_least_rows_beside_another_realtime_sequence() -> None:
    cost = CostModel({1: 5.0, 64: 5.0}, prefill_row_ms=0.3)
    realtime = make_sequence(max_tokens=500, limits=SequenceLimits(REALTIME, tpot_ms=20.0))
    prompt = make_sequence(range(64), limits=SequenceLimits(REALTIME, ttft_ms=500.0))
    candidates = [Candidate(realtime, 1, slack_ms=6.0), Candidate(prompt, 64, slack_ms=400.0)]
    plan = StepPlanner(make_config(step_rows=256, prefill_rows=64), cost).plan(candidates)
    assert [p.rows for p in plan.sequences if p.sequence is prompt] == [16]


def test_without_promises_the_bound_alone_decides() -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=500.0, prefill_rows=256)
    decoding(verifier, 4)
    long = verifier.submit(LONG, 4)
    plan = verifier.step()
    assert {p.sequence: p.chunk for p in plan.sequences}[long] == 256 - 4


def test_a_more_urgent_prompt_need_not_heed_the_promises_of_others() -> None:
    def chunk(service_class: ServiceClass) -> int:
        verifier = VirtualVerifier(max_decode_gap_ms=500.0, prefill_rows=256)
        decoding(verifier, 4, service_class=INTERACTIVE, tpot_ms=10)
        prompt = verifier.submit(200, 4, service_class, ttft_ms=500)
        plan = verifier.step()
        return {p.sequence: p.chunk for p in plan.sequences}[prompt]

    assert chunk(REALTIME) == 200
    assert 16 <= chunk(INTERACTIVE) < 60
    assert chunk(STANDARD) == chunk(INTERACTIVE)


def test_a_promise_that_is_lost_holds_nobody_up() -> None:
    def chunk(tpot_ms: float) -> int:
        verifier = VirtualVerifier(max_decode_gap_ms=500.0, prefill_rows=256)
        decoding(verifier, 4, tpot_ms=tpot_ms)
        prompt = verifier.submit(200, 4)
        return {p.sequence: p.chunk for p in verifier.step().sequences}[prompt]

    assert chunk(2.0) == 200, "no step is as short as that"
    assert chunk(8.0) < 60


def test_a_short_urgent_prompt_goes_before_a_long_one_that_is_under_way() -> None:
    verifier = VirtualVerifier()
    decoding(verifier, 2)
    long = verifier.submit(LONG, 4, BATCH)
    verifier.step()
    urgent = verifier.submit(60, 4, REALTIME, ttft_ms=500)
    verifier.step()
    assert len(verifier.emitted[urgent]) == 1 and not verifier.emitted[long]


def rows_of(plan: StepPlan) -> dict[Sequence, int]:
    return {planned.sequence: planned.chunk for planned in plan.sequences}


def test_beside_a_realtime_prompt_those_that_can_wait_do() -> None:
    verifier = VirtualVerifier(max_sequences=16, prefill_rows=32)
    running = decoding(verifier, 7, service_class=BATCH)
    long = verifier.submit(100, 4, BATCH)
    urgent = verifier.submit(90, 4, REALTIME, ttft_ms=500)
    plan = verifier.step()
    assert rows_of(plan)[urgent] == 90, "prompts of others may take 32 rows"
    assert rows_of(plan)[long] == 16
    assert 0 < len(plan.put_off) == len(running) - sum(s in rows_of(plan) for s in running)
    assert set(running) <= set(rows_of(verifier.step()))


def test_beside_a_realtime_prompt_those_of_the_same_class_go_on() -> None:
    verifier = VirtualVerifier()
    running = decoding(verifier, 7, service_class=REALTIME)
    urgent = verifier.submit(60, 4, REALTIME, ttft_ms=500)
    assert set(rows_of(verifier.step())) == {*running, urgent}


def test_a_stream_of_realtime_prompts_holds_nobody_up_for_longer_than_the_gap() -> None:
    verifier = VirtualVerifier(max_sequences=16, max_decode_gap_ms=60.0)
    running = decoding(verifier, 6, service_class=BATCH)
    long = verifier.submit(300, 4, BATCH)
    for _ in range(60):
        verifier.submit(40, 1, REALTIME, ttft_ms=500)
        verifier.step()
    assert verifier.emitted[long], "16 rows of a step are left to it"
    assert max(gap for s in running for gap in verifier.gaps_ms(s)) <= 60.0 + 1e-6


def chunks_of(verifier: VirtualVerifier, sequence: Sequence) -> list[int]:
    return [p.chunk for plan in verifier.plans for p in plan.sequences if p.sequence is sequence and p.tree is None]


@pytest.mark.parametrize("gap_ms", [500.0, 5.0])
def test_every_step_gets_prompts_on_whatever_is_promised(gap_ms: float) -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=gap_ms)
    decoding(verifier, 7, max_tokens=2000, tpot_ms=9)
    long = verifier.submit(100, 4)
    before = len(verifier.plans)
    verifier.run(lambda: bool(verifier.emitted[long]))
    assert set(chunks_of(verifier, long)) == {16}
    assert len(verifier.plans) - before == 7, "every step from its first on has rows of it"


def test_where_steps_are_long_anyway_prompts_take_half_of_the_time() -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=5.0)
    decoding(verifier, 7)
    long = verifier.submit(500, 4)
    verifier.run(lambda: bool(verifier.emitted[long]))
    assert max(chunks_of(verifier, long)) == int(7.0 / 0.3) and min(chunks_of(verifier, long)) > 10


def test_alone_a_prompt_takes_the_whole_step() -> None:
    verifier = VirtualVerifier(max_decode_gap_ms=5.0)
    long = verifier.submit(600, 4)
    assert [verifier.step().rows for _ in range(3)] == [256, 256, 88]
    assert len(verifier.emitted[long]) == 1


def test_steps_that_cost_nothing_more_are_not_bounded() -> None:
    """Where all that is drafted is verified, rows are taken to be free: prompts are then bounded by rows alone."""
    config = make_config(prefill_rows=32, max_decode_gap_ms=1.0)
    planner = StepPlanner(config, CostModel.free_rows())
    long = make_sequence(range(1, 100))
    plan = planner.plan([Candidate(make_sequence(), 1), Candidate(long, 99)])
    assert [p.chunk for p in plan.sequences] == [1, 32]


def test_nodes_that_do_not_pay_are_none_beside_a_prompt_either() -> None:
    tree = TokenTree.chain((3, 10, 11), (0.0, math.log(0.1), math.log(0.9)))
    steep = CostModel({rows: 5.0 + rows for rows in range(1, 65)})
    planner = StepPlanner(make_config(), steep)
    with_prompt = [Candidate(make_sequence(), 1, tree), Candidate(make_sequence(range(1, 40)), 39)]
    plan = planner.plan(with_prompt)
    assert plan.rows - plan.prefill_rows == 1
    assert planner.node_cost(plan) == 0.0


def test_where_nodes_do_not_pay_nobody_is_drafted_for() -> None:
    planner = StepPlanner(make_config(step_rows=64, max_nodes=8), CostModel({r: float(r) for r in range(1, 65)}))
    promised = make_sequence(limits=SequenceLimits(tpot_ms=20))
    assert planner.draft_budget(promised, 8) == 0
    flat = StepPlanner(make_config(step_rows=64, max_nodes=8), CostModel({64: 5.0}))
    assert flat.draft_budget(promised, 8) == 7


def test_a_late_sequence_gets_the_nodes_that_bring_it_in_time() -> None:
    tree = TokenTree.chain((3, 10, 11), (0.0, math.log(0.7), math.log(0.9)))
    cost = CostModel({8: 10.0, 16: 15.0})
    planner = StepPlanner(make_config(), cost)
    promised = make_sequence(max_tokens=120, limits=SequenceLimits(tpot_ms=10))
    crowd = [Candidate(make_sequence(), 1) for _ in range(7)]

    def nodes(slack_ms: float) -> int:
        plan = planner.plan([Candidate(promised, 1, tree, slack_ms), *crowd])
        return plan.sequences[0].rows - 1

    assert nodes(math.inf) == nodes(12.0) == 0
    assert nodes(2.0) == 2


def test_the_price_of_prefill_rows_is_learnt() -> None:
    cost = CostModel({1: 5.0, 64: 5.0}, prefill_row_ms=0.1, attend_ms=0.0001)
    assert cost.prefill_ms(100, 0) == pytest.approx(10.5)
    assert cost.prefill_ms(100, 1000) == pytest.approx(20.5)
    assert cost.prefill_rows_within(10.5, 500, 0) == 100
    assert cost.prefill_rows_within(0.0, 500, 0) == 0 and cost.prefill_rows_within(1e9, 500, 0) == 500
    for _ in range(300):
        cost.observe(1, 5.0 + 2 * 10.5, prefill_rows=100, attended=5000)
    assert cost.prefill_ms(100, 0) == pytest.approx(21.0, rel=0.05)
    assert cost.step_ms(1) == 5.0, "steps without prompts are as they were"


def test_prefill_and_context_are_measured_at_start_up() -> None:
    def prefill_ms(rows: int, context: int) -> float:
        return 4.0 + rows * (0.25 + 0.0005 * context)

    cost = CostModel.measure(lambda rows: 4.0 + rows / 2, prefill_ms, most_context=1000)
    assert cost.prefill_ms(10, 0) == pytest.approx(10 * 0.25 - 10 * 0.5 / 64, abs=0.1)
    assert cost.prefill_ms(10, 1000) - cost.prefill_ms(10, 0) == pytest.approx(5.0)
    assert CostModel.measure(lambda rows: 4.0 + rows / 2, prefill_ms).prefill_ms(10, 1000) < 3.0
