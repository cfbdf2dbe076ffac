"""A short `make chaos`: verifiers pause and drain, routers die and drain, and no output shows anything of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.chaos.disturbances import Disturbance
from benchmarks.chaos.run import Outcome, Plan, chaos_config, disturbed, reference_config, undisturbed
from benchmarks.chaos.workload import cases
from treeserve_cli.cluster import LocalCluster
from treeserve_cli.layout import ClusterConfig

PAUSE_S = 8.0
PLAN = Plan(
    requests=32,
    max_tokens=(32, 96),
    concurrency=8,
    disturbances=(
        Disturbance("pause", "verifier", pause_s=PAUSE_S),
        Disturbance("drain", "router", 0),
        Disturbance("drain", "verifier"),
        Disturbance("kill", "router", 1),
    ),
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def outcome(cache_dir: Path, model_folder: Path) -> Outcome:
    base = ClusterConfig(model=model_folder, cache_dir=cache_dir, threads=1, kv_tokens=8192, grpc_port=0, http_port=0)
    with LocalCluster(reference_config(base)) as cluster:
        expected = asyncio.run(undisturbed(cluster, cases(PLAN.requests, PLAN.max_tokens), PLAN.concurrency))
    with LocalCluster(chaos_config(base)) as cluster:
        return asyncio.run(disturbed(cluster, PLAN, expected, print))


def test_nothing_is_wrong_lost_or_repeated(outcome: Outcome) -> None:
    assert outcome.verdict.is_clean, outcome.verdict
    assert outcome.verdict.requests == PLAN.requests


def test_no_verifier_holds_anything_at_the_end(outcome: Outcome) -> None:
    assert [(held.sequences, held.blocks) for held in outcome.held] == [(0, 0), (0, 0)]


def test_what_a_paused_verifier_ran_went_on_elsewhere(outcome: Outcome) -> None:
    assert outcome.counters['treeserve_router_hedges_total{outcome="won"}'] > 0
    assert outcome.recovery_ms["pause verifier"]["max"] < 1e3 * PAUSE_S - 500


def test_what_a_draining_verifier_ran_was_moved(outcome: Outcome) -> None:
    assert outcome.counters["treeserve_router_moves_total"] > 0
