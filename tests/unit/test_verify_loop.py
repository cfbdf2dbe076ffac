"""The verify loop: when steps are counted, and when plain ones may follow unplanned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from support.sequences import make_config, make_sequence

from treeserve_core.outcome import FinishReason, VerifyOutcome
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.executor import NO_PLAIN_RUN, ExecutedStep, PlainRun, StepResult
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice
from treeserve_verifier.step_plan import StepPlan


class EngineOfOneToken:
    """Steps that emit token 5 for each sequence, which ends with it or not."""

    def __init__(self, blocks: BlockManager, reason: FinishReason | None) -> None:
        self._blocks = blocks
        self._reason = reason
        self.can_run, self.vocab_size = False, 100
        self.then = NO_PLAIN_RUN
        self.took_s = 0.0
        self.spend: Callable[[float], None] = lambda seconds: None

    async def run(
        self,
        plan: StepPlan,
        wanting: frozenset[int],
        meanwhile: Callable[[], None],
        then: PlainRun,
        features_for: frozenset[int],
    ) -> list[ExecutedStep]:
        await asyncio.sleep(0)
        meanwhile()
        self.then = then
        self.spend(self.took_s)
        for planned in plan.sequences:
            tokens = planned.sequence.tokens
            self._blocks.commit(planned.sequence.seq_id, range(planned.chunk), tokens[-planned.chunk :])
        outcome = VerifyOutcome((), (5,), self._reason)
        return [ExecutedStep(tuple(StepResult(planned, outcome) for planned in plan.sequences), 1.0)]


class Rig:
    """A loop over that engine, on a clock of its own; it may run ahead for ten seconds."""

    def __init__(self, reason: FinishReason | None) -> None:
        config, cost = make_config(), CostModel({1: 1.0, 64: 1.2})
        blocks, planner = BlockManager(64, config.block_size), StepPlanner(config, cost)
        self.now, self.registry, self.cost = 0.0, CollectorRegistry(), cost
        desk = DraftDesk(lambda: self.now, 0.0, lambda sequence: 4, lambda: planner.prices(1))
        scheduler = Scheduler(config, blocks, desk.close, lambda: self.now)
        self.engine = EngineOfOneToken(blocks, reason)
        metrics = VerifierMetrics(self.registry)
        self.engine.spend = self._spend
        self.loop = VerifyLoop(scheduler, desk, planner, self.engine, cost, metrics, lambda: self.now, 10.0)

    def _spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("reason", "counted"), [(FinishReason.STOP, 1.0), (None, 0.0)])
async def test_a_step_that_ends_a_sequence_is_counted_before_its_tokens_leave(
    reason: FinishReason | None, counted: float
) -> None:
    rig = Rig(reason)
    emitted: list[object] = []
    rig.loop.submit(make_sequence(emit=emitted.append))
    await rig.loop.step()
    assert len(emitted) == 1
    found = rig.registry.get_sample_value("treeserve_verifier_emitted_tokens_total")
    assert found == counted, "other steps are counted during the next forward pass"


async def test_all_that_is_done_for_a_step_is_part_of_what_it_costs() -> None:
    """The engine says its forward pass took 1 ms; the whole step took five, and what came before it, such as drafting
    in this process, two."""
    rig = Rig(None)
    rig.engine.took_s = 0.005
    rig.loop.submit(make_sequence())
    for _ in range(200):
        rig.now += 0.002
        await rig.loop.step()
    assert rig.cost.step_ms(1) == pytest.approx(7.0, rel=0.05)


async def test_waiting_is_no_part_of_what_a_step_costs() -> None:
    """Nobody is there for a second before each request, of one token each, which takes 5 ms."""
    rig = Rig(FinishReason.STOP)
    rig.engine.took_s = 0.005
    running = asyncio.create_task(rig.loop.run())
    for _ in range(200):
        await asyncio.sleep(0)
        rig.now += 1.0
        ended = asyncio.Event()
        rig.loop.submit(make_sequence([1], emit=lambda emission, ended=ended: ended.set()))
        await ended.wait()
    running.cancel()
    assert rig.cost.step_ms(1) == pytest.approx(5.0, rel=0.05)


async def test_what_is_done_before_a_wait_for_trees_is_part_of_what_a_step_costs() -> None:
    """Each step of 5 ms is drafted for during 2 ms, and then waits 3 ms for a speculator's tree."""
    rig = Rig(None)
    rig.engine.took_s = 0.005
    loop, waits = rig.loop, iter([])

    def draft_here() -> None:
        rig.now += 0.002 if waits.__length_hint__() == 2 else 0.0

    async def wait() -> None:
        rig.now += 0.003

    loop._draft_here, loop._changed.wait = draft_here, wait  # type: ignore[method-assign,assignment]
    loop._desk.wait_until = lambda sequences: next(waits)  # type: ignore[method-assign]
    loop.submit(make_sequence())
    for _ in range(200):
        waits = iter([rig.now + 1.0, 0.0])
        await loop._until_ready()
        await loop.step()
    assert rig.cost.step_ms(1) == pytest.approx(7.0, rel=0.05)


class Outbox:
    """A speculator that never answers."""

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None: ...

    def commit(self, notice: CommitNotice) -> None: ...

    def release(self, handle: int) -> None: ...


async def test_plain_steps_follow_unplanned_while_nothing_changes() -> None:
    rig = Rig(None)
    rig.loop.submit(make_sequence())
    await rig.loop.step()
    assert rig.engine.then.steps == 0, "the first token does not wait for others"
    rig.loop._changed.clear()
    await rig.loop.step()
    then = rig.engine.then
    assert then.steps > 1000 and then.may_go_on()
    rig.now = 10.0
    assert not then.may_go_on(), "tokens are due to leave"
    rig.now = 1.0
    second = make_sequence()
    rig.loop.submit(second)
    assert not then.may_go_on(), "somebody wants to join"
    await rig.loop.step()
    assert rig.engine.then.steps == 0, "its prompt is read"
    rig.loop.cancel(second)
    await rig.loop.step()
    assert rig.engine.then.steps > 1000
    rig.loop.attach("s", ("ngram",), Outbox(), wants_top_tokens=False)
    await rig.loop.step()
    assert rig.engine.then.steps == 0, "a tree is to be asked for after this one"
