"""Runs of steps: the tokens and counts of planned steps, and every reason not to run or to stop."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support.run_rig import PROMPT, RUN_S, VOCAB, RunRig, generate, native_drafter, until

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.outcome import FinishReason
from treeserve_core.sampling import SequenceLimits
from treeserve_kernels.cpu import library as kernels
from treeserve_speculator.native import library as drafting
from treeserve_verifier.decode_run import stats_of
from treeserve_verifier.planner import StepPlanner

pytestmark = pytest.mark.skipif(not (kernels.is_built() and drafting.is_built()), reason="not built")


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
