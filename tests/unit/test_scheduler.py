"""The scheduler: admission, preemption, cancelling, settling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
from support.sequences import EOS, make_config, make_sequence

from treeserve_core.errors import HandedBackError, OverloadedError
from treeserve_core.outcome import FinishReason, VerifyOutcome
from treeserve_core.sampling import SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Emission, Sequence
from treeserve_verifier.step_plan import PlannedSequence, StepPlan


class Bench:
    """A scheduler over a pool of `blocks` blocks of 4 tokens."""

    def __init__(self, blocks: int = 64, **config: Any) -> None:
        self.now = 0.0
        self._tenants = itertools.count()
        self.blocks = BlockManager(blocks, 4, clock=lambda: self.now)
        self.ended: list[Sequence] = []
        self.emitted: list[Emission] = []
        changes = {"kv_tokens": 4 * blocks, "max_context_tokens": 4 * blocks - 4, **config}
        self.scheduler = Scheduler(make_config(**changes), self.blocks, self.ended.append, lambda: self.now)

    def submit(self, prompt_len: int = 3, max_tokens: int = 8, *, tenant: str | None = None, **limits: Any) -> Sequence:
        """Queue a sequence; without a tenant of its own it shares no KV with others."""
        sequence = make_sequence(
            range(1, prompt_len + 1),
            max_tokens,
            SequenceLimits(**limits),
            self.emitted.append,
            tenant=f"alone-{next(self._tenants)}" if tenant is None else tenant,
        )
        self.scheduler.submit(sequence)
        return sequence

    def commit(self, planned: PlannedSequence, kept: Iterable[int]) -> None:
        """What a step does to the KV of its rows."""
        kept, sequence = list(kept), planned.sequence
        computed = self.blocks.computed_len(sequence.seq_id)
        chunk = sequence.tokens[computed : computed + planned.chunk]
        rows = chunk if planned.tree is None or planned.chunk > 1 else planned.tree.token_ids
        self.blocks.commit(sequence.seq_id, kept, [rows[i] for i in kept])

    def prefill(self, *sequences: Sequence) -> None:
        """Run whole prompts up to the root, as steps would."""
        plan = self.plan(*sequences)
        for planned in plan.sequences:
            self.commit(planned, range(planned.rows))
            self.scheduler.settle(planned, None)

    def plan(self, *sequences: Sequence, tree: TokenTree | None = None) -> StepPlan:
        planned = [PlannedSequence(s, self.scheduler.uncomputed(s), tree) for s in sequences]
        return self.scheduler.reserve(StepPlan(tuple(planned)))

    def check_free(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.free_blocks == self.blocks.total_blocks


def test_sequences_run_in_order_while_places_last() -> None:
    bench = Bench(max_sequences=2)
    sequences = [bench.submit() for _ in range(3)]
    assert bench.scheduler.admit() == sequences[:2]
    bench.scheduler.cancel(sequences[0])
    assert bench.scheduler.admit() == sequences[2:]
    assert len(bench.scheduler) == 2 and bench.ended == [sequences[0]]


def test_sequences_wait_for_blocks_but_one_always_runs() -> None:
    bench = Bench(blocks=8)
    big = [bench.submit(prompt_len=20, max_tokens=4) for _ in range(2)]
    assert bench.scheduler.admit() == big[:1]
    bench.prefill(big[0])
    assert bench.scheduler.admit() == []
    bench.scheduler.cancel(big[0])
    assert bench.scheduler.admit() == big[1:]


def test_waiting_is_bounded() -> None:
    bench = Bench(max_waiting=2)
    bench.submit()
    bench.submit()
    with pytest.raises(OverloadedError):
        bench.submit()


def test_tokens_are_appended_emitted_and_ended() -> None:
    bench = Bench()
    sequence = bench.submit()
    bench.scheduler.admit()
    planned = bench.plan(sequence, tree=TokenTree.root_only(3)).sequences[0]
    bench.commit(planned, range(planned.rows))
    bench.scheduler.settle(planned, VerifyOutcome((), (7,)))
    assert sequence.tokens == [1, 2, 3, 7] and sequence.output_len == 1
    planned = bench.plan(sequence, tree=TokenTree.chain((7, 8))).sequences[0]
    bench.commit(planned, (0, 1))
    bench.scheduler.settle(planned, VerifyOutcome((1,), (8, EOS), FinishReason.STOP))
    assert [(e.offset, e.token_ids, e.finish_reason) for e in bench.emitted] == [
        (0, (7,), None),
        (1, (8, EOS), FinishReason.STOP),
    ]
    assert (sequence.stats.steps, sequence.stats.drafted, sequence.stats.accepted) == (2, 1, 1)
    assert bench.ended == [sequence]
    bench.check_free()


def test_calibration_follows_what_is_accepted() -> None:
    bench = Bench()
    sequence = bench.submit(max_tokens=100)
    bench.scheduler.admit()
    bench.prefill(sequence)

    def step(expected: float) -> None:
        tree = TokenTree.chain((3, 50, 51)) if expected else TokenTree.root_only(3)
        planned = PlannedSequence(sequence, 1, tree, expected)
        bench.blocks.reserve(sequence.seq_id, planned.rows)
        bench.commit(planned, (0,))
        bench.scheduler.settle(planned, VerifyOutcome((), (3,)))

    for _ in range(30):
        step(expected=1.8 * sequence.calibration)
    learnt = sequence.calibration
    assert learnt < 0.3
    fresh = bench.submit()
    assert 0.3 < fresh.calibration < 1.0, "a fresh sequence starts with what was learnt"
    for _ in range(30):
        step(expected=0.0)
    assert learnt < sequence.calibration < 1.0, "what is not tried is forgiven slowly"


def test_calibration_learns_from_trees_that_were_not_tried() -> None:
    bench = Bench()
    sequence = bench.submit(max_tokens=100)
    bench.scheduler.admit()
    bench.prefill(sequence)
    claims_half = TokenTree((3, 50, 51), (-1, 0, 0), (0.0, math.log(0.25), math.log(0.25)))

    def step(emitted: int) -> None:
        planned = PlannedSequence(sequence, 1, TokenTree.root_only(sequence.tokens[-1]), untried=claims_half)
        bench.blocks.reserve(sequence.seq_id, 1)
        bench.commit(planned, (0,))
        bench.scheduler.settle(planned, VerifyOutcome((), (emitted,)))

    for _ in range(20):
        step(emitted=7)
    assert sequence.calibration < 0.5
    for _ in range(40):
        step(emitted=51)
    assert sequence.calibration == pytest.approx(2.0, rel=0.1), "claims of a half that always come true"


def test_cancel_during_a_step_waits_for_it_and_emits_nothing() -> None:
    bench = Bench()
    sequence = bench.submit()
    bench.scheduler.admit()
    planned = bench.plan(sequence, tree=TokenTree.root_only(3)).sequences[0]
    bench.scheduler.cancel(sequence)
    assert bench.ended == [], "the step owns it"
    bench.commit(planned, range(planned.rows))
    bench.scheduler.settle(planned, VerifyOutcome((), (7,)))
    assert bench.ended == [sequence] and bench.emitted == []
    bench.check_free()


def test_nothing_is_emitted_for_a_sequence_cancelled_in_a_step_that_failed() -> None:
    bench = Bench()
    sequence = bench.submit()
    bench.scheduler.admit()
    planned = bench.plan(sequence).sequences[0]
    bench.scheduler.cancel(sequence)
    bench.blocks.rollback(sequence.seq_id)
    bench.scheduler.settle_failed(planned, FloatingPointError("NaN"))
    assert bench.ended == [sequence] and bench.emitted == []
    bench.check_free()


def test_draft_nodes_go_before_anyone_is_preempted() -> None:
    bench = Bench(blocks=4)
    sequence = bench.submit(prompt_len=9)
    bench.scheduler.admit()
    bench.prefill(sequence)
    tree = TokenTree((9, *range(20, 30)), (-1, *[0] * 10))
    planned = bench.scheduler.reserve(StepPlan((PlannedSequence(sequence, 1, tree),))).sequences[0]
    assert planned.rows == 1 and planned.tree == TokenTree.root_only(9)
    assert bench.scheduler.preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    bench = Bench(blocks=6)
    old, young = bench.submit(prompt_len=7), bench.submit(prompt_len=7)
    assert bench.scheduler.admit() == [old, young]
    bench.prefill(old, young)
    old.tokens += range(40, 52)  # it has grown: 19 tokens need 5 blocks
    late = bench.submit(prompt_len=3)
    plan = bench.plan(old, young)
    assert [p.sequence for p in plan.sequences] == [old]
    assert bench.scheduler.preemptions == 1 and bench.scheduler.running == (old,)
    bench.blocks.rollback(old.seq_id)
    bench.scheduler.settle(plan.sequences[0], None)
    bench.scheduler.cancel(old)
    assert bench.scheduler.admit() == [young, late]
    assert bench.scheduler.uncomputed(young) == 3, "of its KV only what nobody can reuse is computed again"
    assert young.tokens == list(range(1, 8)), "no token is lost"


def test_a_failed_step_ends_only_its_sequence() -> None:
    bench = Bench()
    sick, well = bench.submit(), bench.submit()
    bench.scheduler.admit()
    plan = bench.plan(sick, well)
    for planned in plan.sequences:
        bench.blocks.rollback(planned.sequence.seq_id)
    bench.scheduler.settle_failed(plan.sequences[0], FloatingPointError("NaN"))
    bench.scheduler.settle(plan.sequences[1], None)
    assert [type(e.error) for e in bench.emitted] == [FloatingPointError]
    assert bench.scheduler.running == (well,)


def test_shutting_down_hands_everything_back() -> None:
    bench = Bench(max_sequences=1)
    sequences = [bench.submit() for _ in range(3)]
    bench.scheduler.admit()
    bench.prefill(sequences[0])
    bench.scheduler.fail_all("over")
    assert [type(e.error) for e in bench.emitted] == [HandedBackError] * 3
    assert len(bench.scheduler) == 0 and set(bench.ended) == set(sequences)
    bench.check_free()
