"""The step planner: who gets which rows."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from support.sequences import make_config, make_sequence

from treeserve_core.sampling import SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.step_plan import Candidate

FLAT = CostModel({1: 10.0, 64: 10.0})  # nodes are free
STEEP = CostModel({rows: float(rows) for rows in range(1, 65)})  # every row costs as much as the first


def _tree(*probabilities: float, root: int = 3) -> TokenTree:
    """A chain of tokens 10, 11, ... with these conditional probabilities."""
    tokens = (root, *range(10, 10 + len(probabilities)))
    return TokenTree.chain(tokens, (0.0, *(math.log(p) for p in probabilities)))


def test_without_trees_every_decoding_sequence_gets_its_root() -> None:
    planner = StepPlanner(make_config(), FLAT)
    plan = planner.plan([Candidate(make_sequence(), 1), Candidate(make_sequence(), 1)])
    assert [(p.chunk, len(p.tree) if p.tree else None) for p in plan.sequences] == [(1, 1), (1, 1)]
    assert plan.rows == 2


def test_free_nodes_are_all_taken_and_costly_ones_are_not() -> None:
    candidate = Candidate(make_sequence(), 1, _tree(0.9, 0.9, 0.9))
    assert StepPlanner(make_config(), FLAT).plan([candidate]).rows == 4
    assert StepPlanner(make_config(), STEEP).plan([candidate]).rows == 1, "a node below probability 1 never pays here"


def test_with_free_rows_even_unlikely_nodes_are_verified_and_any_wait_pays() -> None:
    planner = StepPlanner(make_config(), CostModel.free_rows())
    plan = planner.plan([Candidate(make_sequence(), 1, _tree(*[0.1] * 8))])
    assert plan.rows == 9
    assert planner.node_cost(plan) == 0.0
    assert planner.prices(8).row == 0.0 and planner.prices(8).token_s > 3600.0


def test_the_price_of_a_node_is_that_of_the_cheapest_number_of_nodes() -> None:
    stairs = StepPlanner(make_config(), CostModel({1: 10.0, 4: 10.6, 8: 14.0, 64: 80.0}))
    alone = stairs.prices(1)
    assert alone.row == pytest.approx(0.06), "one row goes up to the next stair"
    assert alone.node == pytest.approx(0.06 / 3), "so three cost as much as one"
    assert stairs.prices(8).node == pytest.approx((80.0 / 14.0 - 1.0) / 7)
    assert StepPlanner(make_config(), STEEP).prices(1).node == pytest.approx(1.0)
    assert StepPlanner(make_config(), CostModel.free_rows()).prices(1).node == 0.0
    assert StepPlanner(make_config(), FLAT).prices(64).node == 1.0, "beyond the table its last slope goes on"


def test_a_cost_cliff_is_respected() -> None:
    cliff = CostModel({4: 10.0, 64: 40.0})
    plan = StepPlanner(make_config(), cliff).plan([Candidate(make_sequence(), 1, _tree(*[0.8] * 6))])
    assert plan.rows == 4


def test_the_best_nodes_of_all_sequences_win() -> None:
    sure, unsure = make_sequence(), make_sequence()
    three_rows = CostModel({3: 10.0, 64: 1000.0})
    plan = StepPlanner(make_config(), three_rows).plan(
        [Candidate(unsure, 1, _tree(0.2)), Candidate(sure, 1, _tree(0.9))]
    )
    assert {p.sequence: p.rows for p in plan.sequences} == {unsure: 1, sure: 2}


def test_calibration_scales_what_drafters_claim() -> None:
    sequence = make_sequence()
    slope = CostModel({1: 10.0, 2: 14.0, 3: 100.0})
    candidate = Candidate(sequence, 1, _tree(0.9))
    assert StepPlanner(make_config(), slope).plan([candidate]).rows == 2
    sequence.calibration = 0.1
    assert StepPlanner(make_config(), slope).plan([candidate]).rows == 1


def test_a_tree_never_outgrows_what_is_left_to_generate_or_the_requests_own_limit() -> None:
    ending = make_sequence(prompt=(1, 2, 3), max_tokens=2)
    assert StepPlanner(make_config(), FLAT).plan([Candidate(ending, 1, _tree(0.9, 0.9, 0.9))]).rows == 2
    limited = make_sequence(limits=SequenceLimits(max_nodes=2))
    assert StepPlanner(make_config(), FLAT).plan([Candidate(limited, 1, _tree(0.9, 0.9, 0.9))]).rows == 3


def test_equal_probabilities_keep_parents() -> None:
    tree = TokenTree((3, 10, 11, 12, 13), (-1, 0, 1, 2, 0), (0.0, 0.0, 0.0, 0.0, 0.0))
    for rows in range(1, 6):
        cliff = CostModel({rows: 1.0, 64: 100.0})
        planned = StepPlanner(make_config(), cliff).plan([Candidate(make_sequence(), 1, tree)]).sequences[0]
        assert planned.tree is not None and planned.rows == rows


def test_prefill_shares_the_step_and_is_bounded_beside_decoding() -> None:
    planner = StepPlanner(make_config(step_rows=64, prefill_rows=16), FLAT)
    long = make_sequence(prompt=range(1, 91))
    alone = planner.plan([Candidate(long, 90)])
    assert [(p.chunk, p.tree) for p in alone.sequences] == [(64, None)]
    beside = planner.plan([Candidate(make_sequence(), 1), Candidate(long, 90)])
    assert [p.chunk for p in beside.sequences] == [1, 16]


def test_draft_nodes_leave_room_for_prefill() -> None:
    config = make_config(step_rows=16, max_sequences=8, prefill_rows=4)
    drafted = [Candidate(make_sequence(), 1, _tree(*[1.0] * 15)) for _ in range(2)]
    assert StepPlanner(config, FLAT).plan(drafted).rows == 16
    newcomer = make_sequence()
    plan = StepPlanner(config, FLAT).plan([*drafted, Candidate(newcomer, 100)])
    assert plan.rows == 16 and {p.sequence: p.rows for p in plan.sequences}[newcomer] == 4
    plan = StepPlanner(config, FLAT).plan([*drafted, Candidate(newcomer, 2)])
    assert plan.rows == 16 and {p.sequence: p.rows for p in plan.sequences}[newcomer] == 2


def test_the_last_prefill_chunk_reaches_the_root_and_asks_for_its_logits() -> None:
    sequence = make_sequence(prompt=range(1, 11))
    planned = StepPlanner(make_config(), FLAT).plan([Candidate(sequence, 10)]).sequences[0]
    assert planned.chunk == 10 and planned.tree == TokenTree.root_only(10)
    assert planned.rows == 10


@pytest.mark.parametrize("running", [1, 4, 40])
def test_the_draft_budget_is_a_share_of_the_step(running: int) -> None:
    planner = StepPlanner(make_config(step_rows=64, max_nodes=8), FLAT)
    assert planner.draft_budget(make_sequence(), running) == min(8, (64 - running) // running)
    assert planner.draft_budget(make_sequence(limits=SequenceLimits(max_nodes=0)), running) == 0
    assert planner.draft_budget(make_sequence(max_tokens=1), running) == 0


def test_cost_model_is_a_staircase_that_learns() -> None:
    cost = CostModel({1: 10.0, 8: 17.0})
    assert [cost.step_ms(rows) for rows in (1, 2, 8, 16)] == [10.0, 17.0, 17.0, 34.0]
    for _ in range(200):
        cost.observe(8, 34.0)
    assert cost.step_ms(8) == pytest.approx(34.0, rel=0.05)
    before = cost.step_ms(1)
    cost.observe(1, 1e9)
    assert cost.step_ms(1) < 1.2 * before, "one outlier moves little"
    for _ in range(400):
        cost.observe(1, 100.0)
    assert cost.step_ms(8) >= cost.step_ms(1), "more rows never cost less"
    with pytest.raises(ValueError, match="positive"):
        CostModel({})


def test_a_short_pass_is_timed_four_times_and_a_long_one_twice() -> None:
    taken: Counter[int] = Counter()

    def time_ms(rows: int) -> float:
        taken[rows] += 1
        return 5.0 + rows / 2.0

    CostModel.measure(time_ms)
    assert taken[4] == taken[8] == 4
    assert taken[48] == 2 and taken[64] == 2 + 1, "the first pass of all, which pays for allocations, comes on top"


@pytest.mark.parametrize("factor", [0.5, 6.0])
@pytest.mark.parametrize(("first", "last"), [(2, 6), (7, 8), (20, 36), (90, 91)])
def test_a_change_of_speed_at_start_up_spoils_the_price_of_no_row(first: int, last: int, factor: float) -> None:
    passes = 0

    def time_ms(rows: int) -> float:
        nonlocal passes
        passes += 1
        return (4.0 + rows / 4.0) * (factor if first <= passes < last else 1.0)

    table = CostModel.measure(time_ms).table
    for rows in (1, 4, 8, 12, 16, 24, 32):
        assert table[rows] / table[1] == pytest.approx((4.0 + rows / 4.0) / 4.25), rows


def test_where_rows_are_cheap_more_of_them_are_timed() -> None:
    """As on a GPU: 33 sequences and more are drafted for, because nobody has to guess what 66 rows cost."""
    flat = CostModel.measure(lambda rows: 8.0 + rows / 100.0, most_rows=192)
    assert max(flat.table) == 192 and flat.step_ms(150) == pytest.approx(8.0 + 1.92, rel=0.02)
    assert StepPlanner(make_config(step_rows=192, max_nodes=8), flat).draft_budget(make_sequence(), 40) > 0
    assert max(CostModel.measure(lambda rows: 8.0 + rows / 100.0).table) == 64, "a step has no more rows"
    assert max(CostModel.measure(lambda rows: 3.0 + rows / 4.0, most_rows=192).table) == 64, "as on a CPU"


def test_fewer_rows_are_not_taken_for_dearer_than_more_rows_were() -> None:
    table = CostModel.measure(lambda rows: 9.0 if rows < 16 else 4.0 + rows / 4.0).table
    assert table[1] == table[12] == table[16] == 8.0


def test_steps_soon_outweigh_what_was_timed_at_start_up() -> None:
    cost = CostModel.measure(lambda rows: 4.0 if rows == 1 else 8.0 + rows / 4.0)
    assert not cost.is_proved(4)
    for _ in range(4):
        cost.observe(4, 5.0)
    assert cost.is_proved(4) and cost.step_ms(4) < 6.0
    for _ in range(20):
        cost.observe(4, 5.0)
    before = cost.step_ms(4)
    cost.observe(4, 1e9)
    assert cost.step_ms(4) < 1.2 * before, "later one outlier moves little"


def test_rows_that_were_dear_only_at_start_up_are_drafted_for_until_steps_show_their_price() -> None:
    timed = CostModel.measure(lambda rows: 4.0 * rows)
    planner = StepPlanner(make_config(step_rows=64, max_nodes=8), timed)
    for _ in range(3):
        assert planner.draft_budget(make_sequence(), 1) > 0
        timed.observe(4, 16.0)
    assert planner.draft_budget(make_sequence(), 1) == 0


def test_rows_that_seemed_too_dear_once_are_tried_again() -> None:
    """A slow start, first trees that were held up, and a machine that is twice as fast afterwards."""
    cost = CostModel.measure(lambda rows: 4.0 + 0.1 * rows)
    planner = StepPlanner(make_config(step_rows=64, max_nodes=8), cost)
    for _ in range(4):
        cost.observe(4, 12.0)
    for _ in range(20):
        cost.observe(1, 2.0)
    assert planner.draft_budget(make_sequence(), 1) == 0, "a row seems to cost more than a token"
    for _ in range(3000):
        cost.observe(1, 2.0)
    assert planner.draft_budget(make_sequence(), 1) > 0
    assert planner.prices(1).row < 0.2


def test_prefill_rows_that_seemed_to_cost_nothing_get_their_price_from_steps() -> None:
    cost = CostModel.measure(lambda rows: 5.0, lambda rows, context: 5.0, most_context=1000)
    assert cost.prefill_ms(100, 0) < 0.1
    for _ in range(200):
        cost.observe(1, 35.0, 100, 100 * 50.0)
    assert cost.prefill_ms(100, 0) > 25.0


def test_a_machine_that_slows_down_slows_all_entries() -> None:
    cost = CostModel({1: 10.0, 8: 20.0, 64: 80.0})
    for _ in range(100):
        cost.observe(1, 20.0)
    assert cost.step_ms(64) > 110.0
