"""A machine model's cost table, measured on a real engine."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_simulator.calibration import measure_costs

ROWS, CONTEXTS = (1, 4, 8), (0, 16)


@pytest.fixture
def runner(tiny_model: Path) -> ModelRunner:
    return ModelRunner(load_model(tiny_model, dtype="float32", device="cpu", threads=1), num_blocks=64, block_size=4)


def test_every_size_is_timed_and_nothing_stays_behind(runner: ModelRunner) -> None:
    with ThreadPoolExecutor(1) as thread:
        costs = measure_costs(runner, thread, rows=ROWS, contexts=CONTEXTS)
    assert (costs.rows, costs.contexts) == (ROWS, CONTEXTS)
    assert all(ms > 0 for line in costs.pass_ms for ms in line)
    assert costs.logits_ms[0] == 0.0
    runner.blocks.check_integrity()
    assert runner.blocks.free_blocks == 64


def test_passes_that_all_take_the_same_cost_the_same(runner: ModelRunner) -> None:
    readings = itertools.count()
    with ThreadPoolExecutor(1) as thread:
        costs = measure_costs(runner, thread, lambda: next(readings) * 0.002, ROWS, CONTEXTS)
    assert set(itertools.chain(*costs.pass_ms)) == {2.0}
    assert (set(costs.logits_ms), costs.sequence_ms, costs.context_ms) == ({0.0}, 0.0, 0.0)
