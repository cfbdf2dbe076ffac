"""The verify loop: a finished generation is counted before anybody can learn that it ended."""

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
from treeserve_verifier.executor import ExecutedStep, StepResult
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import StepPlan, StepPlanner
from treeserve_verifier.scheduler import Scheduler


class EngineOfOneToken:
    """Steps that emit token 5 for each sequence, which ends with it or not."""

    def __init__(self, blocks: BlockManager, reason: FinishReason | None) -> None:
        self._blocks = blocks
        self._reason = reason

    async def run(self, plan: StepPlan, wanting: frozenset[int], meanwhile: Callable[[], None]) -> ExecutedStep:
        await asyncio.sleep(0)
        meanwhile()
        for planned in plan.sequences:
            self._blocks.commit(planned.sequence.seq_id, range(planned.chunk))
        outcome = VerifyOutcome((), (5,), self._reason)
        return ExecutedStep(tuple(StepResult(planned, outcome) for planned in plan.sequences), 1.0)


@pytest.mark.parametrize(("reason", "counted"), [(FinishReason.STOP, 1.0), (None, 0.0)])
async def test_a_step_that_ends_a_sequence_is_counted_before_its_tokens_leave(
    reason: FinishReason | None, counted: float
) -> None:
    config, registry, cost = make_config(), CollectorRegistry(), CostModel({1: 1.0})
    blocks, planner = BlockManager(64, config.block_size), StepPlanner(config, cost)
    desk = DraftDesk(lambda: 0.0, 0.0, lambda sequence: 0, lambda: planner.prices(1))
    scheduler = Scheduler(config, blocks, desk.close)
    engine = EngineOfOneToken(blocks, reason)
    loop = VerifyLoop(scheduler, desk, planner, engine, cost, VerifierMetrics(registry), lambda: 0.0)
    emitted: list[object] = []
    loop.submit(make_sequence(emit=emitted.append))
    await loop.step()
    assert len(emitted) == 1
    found = registry.get_sample_value("treeserve_verifier_emitted_tokens_total")
    assert found == counted, "other steps are counted during the next forward pass"
