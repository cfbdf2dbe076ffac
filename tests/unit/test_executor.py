"""The executor: what happens beside a step, and the tokens a target held most probable."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from support.sequences import VOCAB, make_sequence

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.runner import ModelRunner
from treeserve_verifier.executor import NO_PLAIN_RUN, PlainRun, StepExecutor
from treeserve_verifier.step_plan import PlannedSequence, StepPlan


class SlowModel:
    """A forward pass that ends only once it is let go. Token 5 wins, and padding beyond the vocabulary more."""

    class config:  # noqa: N801 (as the engine's interface names it)
        vocab_size = VOCAB + 4
        max_position_embeddings = 64

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def new_kv(self, num_blocks: int, block_size: int) -> None:
        """Nothing is kept."""

    def forward(self, batch: ForwardBatch, kv: None) -> npt.NDArray[np.float32]:
        assert self.let_go.wait(10.0), "nothing happened in the meantime"
        logits = -np.arange(VOCAB + 4, dtype=np.float32)
        logits[5], logits[VOCAB:] = 1.0, 2.0
        return np.tile(logits, (len(batch.logits_indices), 1))


async def test_what_waited_for_the_step_is_done_while_it_runs() -> None:
    model, sequence = SlowModel(), make_sequence()
    runner = ModelRunner(model, 8, 4)
    runner.blocks.add(sequence.seq_id)
    runner.blocks.reserve(sequence.seq_id, 1)
    plan = StepPlan((PlannedSequence(sequence, 1, TokenTree.root_only(3)),))
    with ThreadPoolExecutor(1) as thread:
        executor = StepExecutor(runner, thread, VOCAB)
        run = executor.run(plan, frozenset({sequence.seq_id}), model.let_go.set, NO_PLAIN_RUN)
        (step,) = await asyncio.wait_for(run, 15.0)
    assert step.results[0].outcome is not None and step.results[0].outcome.token_ids == (5,)
    assert step.results[0].top_token_ids == ((5, *range(5), 6, 7),), "padding is no token"


async def test_top_tokens_are_looked_for_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        "treeserve_verifier.top_tokens.find_largest", lambda logits, num: (looks.append(num), [1, 2])[1]
    )
    model, sequence = SlowModel(), make_sequence()
    model.let_go.set()
    runner = ModelRunner(model, 8, 4)
    runner.blocks.add(sequence.seq_id)
    wanted, found = frozenset({sequence.seq_id}), []
    with ThreadPoolExecutor(1) as thread:
        executor = StepExecutor(runner, thread, VOCAB)
        for root in (3, 5):
            runner.blocks.reserve(sequence.seq_id, 1)
            plan = StepPlan((PlannedSequence(sequence, 1, TokenTree.root_only(root)),))
            (step,) = await executor.run(plan, wanted, lambda: found.append(len(looks)), NO_PLAIN_RUN)
    assert found == [0, 0] and len(looks) == 1, "those of the first step, after what waited for the second one"
    assert list(step.results[0].top_token_ids[0]) == [1, 2] and len(looks) == 2, "who cannot wait looks"


async def test_plain_steps_follow_one_another_until_something_happens() -> None:
    for most, blocks, expected in ((5, 8, 3), (1, 8, 2), (5, 1, 1)):
        model, sequence = SlowModel(), make_sequence()
        model.let_go.set()
        runner = ModelRunner(model, blocks, 2)
        runner.blocks.add(sequence.seq_id)
        runner.blocks.reserve(sequence.seq_id, 1)
        plan = StepPlan((PlannedSequence(sequence, 1, TokenTree.root_only(3)),))
        may_go_on = iter([True, True, False])
        with ThreadPoolExecutor(1) as thread:
            executor = StepExecutor(runner, thread, VOCAB)
            then = PlainRun(most, lambda: next(may_go_on))  # noqa: B023
            steps = await executor.run(plan, frozenset(), lambda: None, then)
        assert [step.results[0].outcome.token_ids for step in steps] == [(5,)] * expected
        assert runner.blocks.computed_len(sequence.seq_id) == expected
        runner.blocks.check_integrity()


async def test_no_plain_step_follows_the_end_of_a_sequence() -> None:
    model, sequence = SlowModel(), make_sequence(max_tokens=2)
    model.let_go.set()
    runner = ModelRunner(model, 8, 2)
    runner.blocks.add(sequence.seq_id)
    runner.blocks.reserve(sequence.seq_id, 1)
    plan = StepPlan((PlannedSequence(sequence, 1, TokenTree.root_only(3)),))
    with ThreadPoolExecutor(1) as thread:
        then = PlainRun(9, lambda: True)
        steps = await StepExecutor(runner, thread, VOCAB).run(plan, frozenset(), lambda: None, then)
    assert [step.results[0].is_last for step in steps] == [False, True]
