"""Who drafts for runs of steps: drafters that fail, speculators that are silent, and what trees are learned to save."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import time
import weakref
from typing import Any

import numpy as np
import pytest
from support.run_rig import PROMPT, RUN_S, RunRig, native_drafter, until

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.sampling import SequenceLimits
from treeserve_kernels.cpu import library as kernels
from treeserve_speculator.native import library as drafting
from treeserve_speculator.native_drafter import NativeDrafter

pytestmark = pytest.mark.skipif(not (kernels.is_built() and drafting.is_built()), reason="not built")


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
