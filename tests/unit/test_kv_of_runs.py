"""The KV that runs of steps reserve, find and leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.int8_decoders import NativeModel, Sizes, random_model
from support.run_rig import PROMPT, RUN_S, VOCAB, Generation, RunRig, generate, native_drafter, until

from treeserve_engine.batch import SequenceRows
from treeserve_engine.kv_storage import TierBytes
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu import library as kernels
from treeserve_kernels.cpu.decode_run import RunSequence, RunTerms
from treeserve_speculator.native import library as drafting

pytestmark = pytest.mark.skipif(not (kernels.is_built() and drafting.is_built()), reason="not built")


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
