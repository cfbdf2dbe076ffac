"""Runs of steps: the tokens, counts and KV of planned steps, and every reason not to run or to stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.int8_decoders import NativeModel, Sizes, random_model
from support.run_rig import VOCAB, Generation, RunRig, native_drafter

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.outcome import FinishReason
from treeserve_core.sampling import SequenceLimits
from treeserve_engine.batch import SequenceRows
from treeserve_engine.kv_storage import TierBytes
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu import library as kernels
from treeserve_kernels.cpu.decode_run import RunSequence, RunTerms
from treeserve_speculator.native import library as drafting
from treeserve_speculator.native_drafter import NativeDrafter
from treeserve_verifier.decode_run import stats_of
from treeserve_verifier.planner import StepPlanner

pytestmark = pytest.mark.skipif(not (kernels.is_built() and drafting.is_built()), reason="not built")

RUN_S = 0.02
PROMPT = [5, 9, 5, 9, 7, 5, 9, 5]


def requests(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of every kind that a run takes."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 30.0, "seed": 7},  # of a model that is very sure of itself
        {"temperature": 1e-3, "seed": 1},
        {"stopping": {"stop_token_ids": (11, 37)}},
        {"stopping": {"min_tokens": 5}},
        {"stopping": {"ignore_eos": True}},
        {"limits": SequenceLimits(max_nodes=2)},
        {"limits": SequenceLimits(max_nodes=0)},
        {"limits": SequenceLimits(tpot_ms=3.0, ttft_ms=50.0)},
        {"generated": (4, 8, 15)},
        {"temperature": 20.0, "seed": 3, "top_p": 0.8},
        {"temperature": 20.0, "seed": 4, "top_k": 9, "min_p": 0.01, "presence_penalty": 0.5},
        {"temperature": 2.0**-200, "seed": 1},
        {"repetition_penalty": 1.3},
        {"top_log_probs": 2},
        {"logit_bias": {5: 2.0}},
        {"limits": SequenceLimits(acceptance=Acceptance(AcceptanceRule.MULTI_STEP))},
    ]
    made = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(2, 30))]
        made.append({"prompt": prompt, "max_tokens": rng.choice((5, 20, 60)), **kinds[i % len(kinds)]})
    return made


async def generate(rig: RunRig, asked: list[dict[str, Any]], at_once: int) -> list[Generation]:
    slots = asyncio.Semaphore(at_once)

    async def one(request: dict[str, Any]) -> Generation:
        async with slots:
            _, generation = rig.submit(**request)
            await asyncio.wait_for(generation.ended.wait(), 20)
            return generation

    return await asyncio.gather(*map(one, asked))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


@pytest.mark.parametrize("at_once", [1, 4, 8])
@pytest.mark.parametrize("drafts", [True, False])
async def test_tokens_are_those_of_planned_steps(at_once: int, drafts: bool) -> None:
    asked = requests(40, seed=at_once)
    async with RunRig(0.0, native_drafter() if drafts else None) as planned:
        expected = await generate(planned, asked, at_once)
        assert not planned.executor.runs
    async with RunRig(RUN_S, native_drafter() if drafts else None) as rig:
        found = await generate(rig, asked, at_once)
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        assert [g.finish_reason for g in found] == [g.finish_reason for g in expected]
        assert [g.log_probs for g in found] == [g.log_probs for g in expected]
        in_runs = sum(len(each.token_ids) for run in rig.executor.runs for each in run.ran.sequences)
        assert in_runs > sum(len(g.token_ids) for g in found) / 4, "many of them were taken in runs"
        if drafts:
            records = [r for run in rig.executor.runs for each in run.ran.sequences for r in each.records]
            assert sum(r.accepted for r in records) > 20, "and drafts came true there"
        assert rig.blocks.free_blocks == rig.blocks.total_blocks
        rig.blocks.check_integrity()
        assert all(run.ran.error is None for run in rig.executor.runs)


async def test_a_run_of_one_sequence_ends_with_it_and_is_counted_once() -> None:
    async with RunRig(10.0, native_drafter()) as rig:
        _, generation = rig.submit(PROMPT, 50, stopping={"ignore_eos": True})
        await generation.ended.wait()
        assert len(generation.token_ids) == 50 and generation.finish_reason is FinishReason.LENGTH
        stats, runs = generation.stats, rig.executor.runs
        assert stats is not None and runs and len(runs) <= 3, "all but the first few tokens in one run, or two"
        assert stats.steps + stats.accepted == 50, "each step emits what it accepts and one token"
        in_runs = [stats_of(each) for run in runs for each in run.ran.sequences]
        assert stats.accepted >= sum(s.accepted for s in in_runs) > 10
        assert stats.accepted_per_depth == sorted(stats.accepted_per_depth, reverse=True)
        assert sum(stats.accepted_per_depth) == stats.accepted
        assert rig.count("treeserve_verifier_emitted_tokens_total") == 50
        assert rig.count("spec_decode_num_accepted_tokens_total") == stats.accepted
        assert rig.count("spec_decode_num_draft_tokens_total") == stats.drafted
        per_source = [
            rig.count("treeserve_verifier_accepted_tokens_per_source_total", source=s)
            for s in ("ngram", "suffix", "recycling")
        ]
        assert max(per_source) > 0 and sum(per_source) >= stats.accepted
        positions = [
            rig.count("spec_decode_num_accepted_tokens_per_pos_total", position=str(depth))
            for depth in range(len(stats.accepted_per_depth))
        ]
        assert positions == stats.accepted_per_depth
        assert rig.loop.load().step_ms > 0.0 and rig.loop.load().work_s > 0.0


async def test_prompts_are_computed_in_runs_and_counted_once() -> None:
    prompt = list(range(1, 101))
    async with RunRig(10.0, native_drafter(), step_rows=32, prefill_rows=16) as rig:
        _, first = rig.submit(PROMPT, 300, stopping={"ignore_eos": True})
        await until(lambda: bool(first.token_ids))
        _, second = rig.submit(prompt, 20, stopping={"ignore_eos": True})
        await asyncio.gather(first.ended.wait(), second.ended.wait())
        runs = rig.executor.runs
        read = sum(each.num_read for run in runs for each in run.ran.sequences)
        assert read == len(PROMPT) + len(prompt)
        assert rig.count("treeserve_verifier_prefill_tokens_total") == read - 2, "roots are not counted"
        beside = [run for run in runs if len(run.plan.sequences) == 2 and any(each.unread for each in run.plan.of_each)]
        assert max(len(run.ran.steps) for run in beside) > 3, "of 16 rows each"
        assert all(0 < step.prefill_rows <= 16 for run in beside for step in run.ran.steps)
        for generation, count in ((first, 300), (second, 20)):
            assert len(generation.token_ids) == count
            assert generation.stats is not None and generation.stats.steps + generation.stats.accepted == count


@pytest.mark.parametrize(("holds_ms", "most"), [(0.0, 1), (-3.0, 1), (math.inf, 7)])
async def test_a_step_that_cannot_be_repeated_is_planned_again(
    monkeypatch: pytest.MonkeyPatch, holds_ms: float, most: int
) -> None:
    plan = StepPlanner.plan
    monkeypatch.setattr(StepPlanner, "plan", lambda *args: replace(plan(*args), holds_ms=holds_ms))
    async with RunRig(10.0, step_rows=32, prefill_rows=16) as rig:
        _, first = rig.submit(PROMPT, 300, stopping={"ignore_eos": True})
        await until(lambda: bool(first.token_ids))
        _, second = rig.submit(list(range(1, 101)), 2)
        await second.ended.wait()
        reading = [run for run in rig.executor.runs if any(len(each.unread) > 16 for each in run.plan.of_each)]
        assert max(len(run.ran.steps) for run in reading) == most


async def test_the_next_turn_finds_what_a_run_computed() -> None:
    async with RunRig(10.0, native_drafter()) as rig:
        first, generation = rig.submit(PROMPT, 60, stopping={"ignore_eos": True})
        await generation.ended.wait()
        history = [*first.tokens, 3, 1, 4]
        # KV shared under another name would be wrong KV: the answer must be that of a fresh verifier.
        assert rig.blocks.cached_blocks > len(history) // rig.config.block_size - 3
        second, again = rig.submit(history, 30)
        await again.ended.wait()
        assert second.cached_tokens is not None and second.cached_tokens > len(first.tokens) - rig.config.block_size - 2
    async with RunRig(0.0) as fresh:
        _, expected = fresh.submit(history, 30)
        await expected.ended.wait()
    assert again.token_ids == expected.token_ids


async def test_a_newcomer_ends_a_run() -> None:
    async with RunRig(30.0, kv_tokens=16384, max_context_tokens=1024) as rig:
        long = [rig.submit(PROMPT, 1000, stopping={"ignore_eos": True})[1] for _ in range(4)]
        await until(lambda: all(each.token_ids for each in long))
        _, short = rig.submit([3, 4, 5], 2)
        await asyncio.wait_for(short.ended.wait(), 5)
        assert not any(each.ended.is_set() for each in long), "it did not have to wait for their end"


async def test_a_cancelled_sequence_leaves_a_run_soon() -> None:
    async with RunRig(30.0, native_drafter()) as rig:
        sequence, generation = rig.submit(PROMPT, 450, temperature=1.0, stopping={"ignore_eos": True})
        await until(lambda: bool(generation.token_ids))
        rig.loop.cancel(sequence)
        await until(lambda: sequence in rig.ended)
        assert len(sequence.tokens) < 400
        assert rig.blocks.free_blocks == rig.blocks.total_blocks


@pytest.mark.parametrize("rule", [AcceptanceRule.MULTI_STEP, AcceptanceRule.TYPICAL])
async def test_what_is_no_replay_is_planned(rule: AcceptanceRule) -> None:
    async with RunRig(RUN_S, native_drafter()) as rig:
        _, generation = rig.submit(PROMPT, 30, temperature=0.7, limits=SequenceLimits(acceptance=Acceptance(rule)))
        await generation.ended.wait()
        assert not rig.executor.runs


async def test_the_sampler_is_asked_only_where_logits_and_noise_do_not_do() -> None:
    """Before `min_tokens` the end ids may not be chosen, which the sampler alone knows; later runs know enough."""
    async with RunRig(0.0005, native_drafter()) as rig:
        _, generation = rig.submit(PROMPT, 60, stopping={"min_tokens": 20, "stop_token_ids": (3,)})
        await generation.ended.wait()
        described = [run.plan.of_each[0] for run in rig.executor.runs]
        assert all(each.asks == (each.num_tokens < len(PROMPT) + 20) for each in described)
        assert {each.asks for each in described} == {True, False}


class StopsAt:
    """In place of a `TextAssembler`: the stop string is complete with the n-th token."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.stopped: str | None = None

    def push(self, token_ids: list[int]) -> None:
        self._left -= len(token_ids)
        self.stopped = "stop" if self._left <= 0 else None


@pytest.mark.parametrize("count", [2, 3, 17, 18, 19])
async def test_a_stop_string_ends_a_sequence_in_the_middle_of_a_run(count: int) -> None:
    async with RunRig(10.0, native_drafter()) as rig:
        sequence, generation = rig.submit(PROMPT, 60)
        sequence.stop_watch = StopsAt(count)  # type: ignore[assignment]
        _, beside = rig.submit([*PROMPT, 8], 60, stopping={"ignore_eos": True})
        await asyncio.wait_for(generation.ended.wait(), 5)
        assert len(generation.token_ids) == count and generation.finish_reason is FinishReason.STOP
        await asyncio.wait_for(beside.ended.wait(), 5)
        assert len(beside.token_ids) == 60 and rig.executor.runs
        assert rig.blocks.free_blocks == rig.blocks.total_blocks


async def test_a_token_that_cannot_be_chosen_fails_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RunRig(10.0, native_drafter()) as rig:
        sequence, generation = rig.submit(PROMPT, 60, top_log_probs=0)
        _, beside = rig.submit([*PROMPT, 8], 60, stopping={"ignore_eos": True})
        sampler, left = sequence.sampler, [20]

        def next_token(logits: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise FloatingPointError("not finite")
            return type(sampler).next_token(sampler, logits)

        monkeypatch.setattr(sampler, "next_token", next_token)
        await asyncio.wait_for(generation.ended.wait(), 5)
        assert isinstance(generation.error, FloatingPointError) and len(generation.token_ids) == 20
        assert len(generation.log_probs) == 20
        await asyncio.wait_for(beside.ended.wait(), 5)
        assert len(beside.token_ids) == 60 and beside.error is None
        assert rig.blocks.free_blocks == rig.blocks.total_blocks


async def test_short_blocks_leave_it_to_planned_steps() -> None:
    """Two sequences fill the cache; one is preempted, and both end as they should."""
    asked: list[dict[str, Any]] = [
        {"prompt": [i, 1, 2], "max_tokens": 45, "temperature": 1.0, "seed": i, "stopping": {"ignore_eos": True}}
        for i in range(3)
    ]
    async with RunRig(0.0) as planned:
        expected = await generate(planned, asked, 3)
    async with RunRig(RUN_S, native_drafter(), kv_tokens=100, max_context_tokens=64) as rig:
        found = await generate(rig, asked, 3)
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        assert rig.scheduler.preemptions > 0 and rig.executor.runs
        rig.blocks.check_integrity()


class FailingDrafter:
    """Passes everything on to a native drafter, and gives runs a call that fails after some trees."""

    def __init__(self, trees: int) -> None:
        self._inner = native_drafter()
        self._left = trees
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double, ctypes.c_void_p
        )
        inner = drafting.load().ts_drafter_draft

        def draft(drafter: int, handle: int, budget: int, node: float, tree: int) -> int:
            self._left -= 1
            if self._left < 0:
                return 1
            return int(inner(drafter, handle, budget, node, drafting.DraftedTree.from_address(tree)))

        self._draft = kind(draft)

    def begin_run(self, handles: list[int]) -> Any:
        calls = self._inner.begin_run(handles)
        calls.draft = ctypes.cast(self._draft, ctypes.c_void_p).value
        return calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("trees", [0, 1, 7])
async def test_a_drafter_that_fails_within_a_run_costs_nothing_but_speed(trees: int) -> None:
    async with RunRig(0.0) as planned:
        _, expected = planned.submit(PROMPT, 60)
        await expected.ended.wait()
    async with RunRig(RUN_S, FailingDrafter(trees)) as rig:
        _, generation = rig.submit(PROMPT, 60)
        await asyncio.wait_for(generation.ended.wait(), 10)
        assert generation.token_ids == expected.token_ids
        assert any(run.ran.drafter_failed for run in rig.executor.runs)
        _, second = rig.submit(PROMPT, 60)
        await asyncio.wait_for(second.ended.wait(), 10)
        assert second.token_ids == expected.token_ids
        assert not rig.executor.runs[-1].plan.seats, "it is asked no more"


async def test_a_run_that_fails_leaves_everything_to_planned_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RunRig(RUN_S, native_drafter()) as rig:

        def fail(*_: object) -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(rig.runner.model, "decode", fail)
        _, generation = rig.submit(PROMPT, 40, stopping={"ignore_eos": True})
        await asyncio.wait_for(generation.ended.wait(), 10)
        assert len(generation.token_ids) == 40 and generation.error is None
        assert rig.blocks.free_blocks == rig.blocks.total_blocks
        assert all(isinstance(run.ran.error, MemoryError) for run in rig.executor.runs)


async def test_what_trees_save_is_learned_in_runs() -> None:
    """Noise of every seed is drafted for as little as it pays; a loop, as much."""
    async with RunRig(RUN_S, native_drafter()) as rig:
        _, loop = rig.submit(PROMPT, 300, stopping={"ignore_eos": True})
        await asyncio.wait_for(loop.ended.wait(), 10)
        learned = rig.colocated._speculator  # type: ignore[union-attr]
        assert learned is not None and learned.tree_s > 0.0
        records = [r for run in rig.executor.runs for each in run.ran.sequences for r in each.records]
        assert np.mean([r.verified for r in records[len(records) // 2 :]]) >= 2.0
        assert rig.scheduler.calibrator.prior != 1.0


async def test_drafts_are_verified_where_blocks_are_short() -> None:
    """Runs that find no room for their KV must not take away the trees of planned steps."""
    drafted = []
    for run_s in (0.0, 0.05):
        async with RunRig(run_s, native_drafter(), kv_tokens=700, max_context_tokens=256) as rig:
            made = [rig.submit([*PROMPT, i], 240, stopping={"ignore_eos": True})[1] for i in range(4)]
            await asyncio.wait_for(asyncio.gather(*(g.ended.wait() for g in made)), 20)
            drafted.append([g.stats.drafted for g in made if g.stats is not None])
    assert min(drafted[1]) > min(drafted[0]) / 2


async def test_kv_of_leased_sessions_is_not_given_up_for_what_may_never_come() -> None:
    async with RunRig(0.1, native_drafter(), kv_tokens=800, session_lease_s=600.0) as rig:
        history, _ = await session(rig, "kept", 240)
        made = [rig.submit([*PROMPT, i], 400)[1] for i in range(4)]
        rig.cost.observe(1, 1.0)
        for generation in made:
            await until(lambda generation=generation: len(generation.token_ids) >= 8)
        for sequence in list(rig.scheduler):
            rig.loop.cancel(sequence)
        await until(lambda: len(rig.scheduler) == 0)
        again, generation = rig.submit([*history, 5], 2)
        await generation.ended.wait()
        assert rig.executor.runs
        assert again.cached_tokens is not None and again.cached_tokens > len(history) - 2 * rig.config.block_size


async def test_what_a_run_took_ahead_is_reported_free() -> None:
    async with RunRig(10.0, native_drafter()) as rig:
        told: list[tuple[int, int, int]] = []
        sequence, generation = rig.submit(PROMPT, 300, stopping={"ignore_eos": True})

        def look() -> None:
            computed = rig.blocks.total_blocks - -(-(len(sequence.tokens) - 1) // rig.config.block_size)
            told.append((rig.loop.load().free_blocks, computed, rig.blocks.free_blocks))

        rig.loop.observers.append(look)
        await generation.ended.wait()
        in_run = [(free, computed) for free, computed, really_free in told if really_free < computed - 1]
        assert in_run, "a look during a run"
        assert all(abs(free - computed) <= 1 for free, computed in in_run)


async def test_a_drafter_that_fails_beside_a_run_lives_as_long_as_it() -> None:
    runs = []

    class Failing(NativeDrafter):
        def begin_run(self, handles: Any) -> Any:
            runs.append(1)
            return super().begin_run(handles)

        def learn(self) -> None:
            if runs:
                raise RuntimeError("learning failed")

    drafter: Any = native_drafter()
    drafter.__class__ = Failing
    gone = weakref.ref(drafter)
    async with RunRig(10.0, drafter) as rig:
        del drafter
        alive = []
        decode = rig.runner.model.decode  # type: ignore[attr-defined]

        def slowly(*arguments: Any) -> Any:
            while runs and rig.colocated.can_run:  # type: ignore[union-attr]
                time.sleep(0.001)  # the event loop has it learn meanwhile
            if runs:
                gc.collect()
                alive.append(gone() is not None)
            return decode(*arguments)

        rig.runner.model.decode = slowly  # type: ignore[attr-defined]
        _, generation = rig.submit(PROMPT, 60, stopping={"ignore_eos": True})
        await asyncio.wait_for(generation.ended.wait(), 10)
        assert len(generation.token_ids) == 60 and alive[0]
        assert not rig.colocated.can_run  # type: ignore[union-attr]


class Silent:
    """A speculator that never answers."""

    def assign(self, *_: object) -> None: ...

    def commit(self, *_: object) -> None: ...

    def features(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...


async def test_a_silent_speculator_ends_no_runs_for_good() -> None:
    async with RunRig(RUN_S, native_drafter()) as rig:
        rig.loop.attach("silent", ("x",), Silent(), wants_top_tokens=False)
        _, generation = rig.submit(PROMPT, 400, temperature=1.2, stopping={"ignore_eos": True})
        await asyncio.wait_for(generation.ended.wait(), 10)
        assert sum(len(each.token_ids) for run in rig.executor.runs for each in run.ran.sequences) > 300


async def test_the_first_planned_step_after_runs_has_a_tree() -> None:
    """A newcomer is no replay, and the tree for the other was drafted by nobody yet."""
    async with RunRig(0.0005, native_drafter()) as rig:
        decode = rig.runner.model.decode  # type: ignore[attr-defined]

        def slowly(*arguments: Any) -> Any:
            time.sleep(0.01)
            return decode(*arguments)

        rig.runner.model.decode = slowly  # type: ignore[attr-defined]
        sequence, generation = rig.submit(PROMPT, 450, stopping={"ignore_eos": True})
        await until(lambda: len(generation.token_ids) > 60)
        planned: list[int] = []
        run = rig.executor.run

        async def look(plan: Any, *rest: Any) -> Any:
            planned.extend(p.rows for p in plan.sequences if p.sequence is sequence)
            return await run(plan, *rest)

        rig.executor.run = look  # type: ignore[method-assign]
        before = len(rig.executor.runs)
        limits = SequenceLimits(acceptance=Acceptance(AcceptanceRule.MULTI_STEP))
        rig.submit([3, 4, 5], 2, temperature=0.7, limits=limits)
        await until(lambda: bool(planned))
        assert len(rig.executor.runs) > before and planned[0] > 1


async def test_an_ask_of_a_planned_step_is_answered_by_the_run_after_it() -> None:
    """Also where the sequence is asked for no more: or else it would wait as long as runs go on."""
    rig = RunRig(RUN_S, native_drafter())
    sequence, _ = rig.submit(PROMPT)
    for admitted in rig.scheduler.admit():
        rig.desk.open(admitted)
    seat = rig.desk._seats[sequence][0]
    seat.eager, seat.speculator.probe_at = False, math.inf
    assert rig.desk.before_run([sequence]) == {}
    seat.speculator.ask(seat.handle, time.monotonic())
    assert rig.desk.before_run([sequence]) == {sequence: seat}
    rig.desk.ran(sequence, len(sequence.tokens), seat)
    assert not seat.waits


async def session(rig: RunRig, name: str, tokens: int) -> tuple[list[int], Generation]:
    """A first turn of a session; its tokens and what came."""
    sequence, generation = rig.submit(PROMPT, tokens, stopping={"ignore_eos": True}, session=name)
    await generation.ended.wait()
    return list(sequence.tokens), generation


def test_kv_that_is_lost_while_it_is_fetched_is_not_decoded_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix comes back from host memory, or does not."""
    runner = ModelRunner(NativeModel(random_model(Sizes())), 12, 4, tiers=TierBytes(host=1 << 20))

    def compute(seq_id: int, tokens: list[int]) -> None:
        runner.blocks.add(seq_id, tokens, "tenant")
        runner.blocks.reserve(seq_id, len(tokens))
        runner.forward([SequenceRows.from_chain(seq_id, tokens, ())])
        runner.commit(seq_id, range(len(tokens)))
        runner.blocks.free(seq_id)

    tokens = [7 * i % 200 for i in range(17)]
    compute(1, tokens[:16])
    compute(2, list(range(40)))  # pushes the first out
    assert runner.blocks.add(3, tokens, "tenant") == 16

    def fail(copy: object) -> None:
        raise OSError("i/o error")

    monkeypatch.setattr(runner._storage, "copy", fail)
    runner.blocks.reserve_ahead({3: 4})
    described = [RunSequence(17, tokens[-1], 3, (), temperature=1.5)]
    with pytest.raises(ValueError, match="lost"):
        runner.decode([3], described, RunTerms(VOCAB, 8, {1: 1.0}, max_steps=2), lambda *_: (-1, False))
    runner.blocks.check_integrity()
