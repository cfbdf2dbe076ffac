"""Processes die in the middle of generations: nothing is lost, repeated or changed. Real model, real services."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treeserve_cli.cluster import LocalCluster
from treeserve_cli.layout import ClusterConfig
from treeserve_client import Client, Completion, Model

PROMPT = "Repeat after me: one potato, two potato, three potato, four. One potato, two potato,"
REQUEST: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0.8, "top_p": 0.95}
TOKENS_BEFORE_DEATH = 8
# Each death has seeds of its own: a request that was drafted before is remembered, and over before anything dies.
SPECULATOR, VERIFIER, REDIS, ROUTER = (range(first, first + 4) for first in (0, 4, 8, 12))

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(cache_dir: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two verifiers and one speculator. What dies is restarted, as a Deployment would."""
    config = ClusterConfig(
        model=model_folder,
        cache_dir=cache_dir,
        run_dir=tmp_path_factory.mktemp("chaos"),
        verifiers=2,
        threads=1,
        kv_tokens=8192,
        settings=("verifier.draft_always=true",),
        grpc_port=0,
        http_port=0,
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster) -> dict[int, Completion]:
    """What each seed gives when nothing dies and nothing is drafted."""
    with Client(cluster.grpc_address) as client, ThreadPoolExecutor(4) as pool:

        def plain(seed: int) -> Completion:
            return client.complete(seed=seed, speculation=False, **REQUEST)

        return dict(enumerate(pool.map(plain, range(ROUTER.stop))))


def _generate(client: Client, seed: int, progress: threading.Semaphore) -> Completion:
    """Stream one request, checking offsets as they come, and signal when it is well under way."""
    received = 0
    with client.generate(seed=seed, **REQUEST) as stream:
        for chunk in stream:
            assert chunk.offset == received, "no gap and no repeat"
            before, received = received, received + len(chunk.token_ids)
            if before < TOKENS_BEFORE_DEATH <= received:
                progress.release()
        return stream.result


def _run_and_kill(cluster: LocalCluster, seeds: range, kill: Callable[[], None]) -> dict[int, Completion]:
    """Four requests at once; `kill` comes when each is under way."""
    progress = threading.Semaphore(0)
    with Client(cluster.grpc_address) as client, ThreadPoolExecutor(4) as pool:
        runs = {seed: pool.submit(_generate, client, seed, progress) for seed in seeds}
        for _ in runs:
            assert progress.acquire(timeout=60)
        assert not any(run.done() for run in runs.values()), "the death must come in the middle"
        kill()
        return {seed: run.result(timeout=200) for seed, run in runs.items()}


def _check(done: dict[int, Completion], undisturbed: dict[int, Completion]) -> None:
    for seed, completion in done.items():
        expected = undisturbed[seed]
        assert list(completion.token_ids) == list(expected.token_ids)
        assert completion.text == expected.text
        assert completion.finish_reason == expected.finish_reason
        # What a verifier still had in its cache depends on what ran there before.
        assert replace(completion.usage, cached_tokens=0) == replace(expected.usage, cached_tokens=0)


def _wait_whole(cluster: LocalCluster) -> None:
    """Until all processes run and both verifiers serve again with their speculator."""
    name = cluster.config.served_name
    deadline = time.monotonic() + 120
    with Client(cluster.grpc_address) as client:
        while not all(child.is_running for group in cluster.processes.values() for child in group):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while not _is_whole(client.get_model(name, deadline_s=10)):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _is_whole(model: Model) -> bool:
    return model.verifiers == 2 and model.speculators == 1


def _replays(cluster: LocalCluster) -> float:
    """How often the router continued a generation elsewhere."""
    with urllib.request.urlopen(f"http://{cluster.http_address}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("treeserve_router_replays_total"))


@pytest.fixture(autouse=True)
def _whole_before_and_after(cluster: LocalCluster) -> Iterator[None]:
    _wait_whole(cluster)
    yield


def test_the_only_speculator_dies(cluster: LocalCluster, undisturbed: dict[int, Completion]) -> None:
    done = _run_and_kill(cluster, SPECULATOR, lambda: cluster.kill("speculator"))
    _check(done, undisturbed)


def test_one_of_two_verifiers_dies(cluster: LocalCluster, undisturbed: dict[int, Completion]) -> None:
    before = _replays(cluster)
    done = _run_and_kill(cluster, VERIFIER, lambda: cluster.kill("verifier", 0))
    _check(done, undisturbed)
    assert _replays(cluster) > before, "it must have held some of the requests"


def test_redis_dies(cluster: LocalCluster, undisturbed: dict[int, Completion]) -> None:
    done = _run_and_kill(cluster, REDIS, lambda: cluster.kill("valkey"))
    _check(done, undisturbed)
    with Client(cluster.grpc_address) as client:
        again = client.complete(seed=0, session_id="s", **REQUEST)
    assert list(again.token_ids) == list(undisturbed[0].token_ids)


def test_the_router_dies_and_the_client_resumes(cluster: LocalCluster, undisturbed: dict[int, Completion]) -> None:
    done = _run_and_kill(cluster, ROUTER, lambda: cluster.kill("router"))
    _check(done, undisturbed)
