"""Reused prefixes over a verifier's stream: turns find their history, wherever it went, and say what cold ones say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.verifier_peers import Output, RouterPeer, RunningVerifier, running_verifier, submission, until

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.block_manager import BlockManager, KvMoves
from treeserve_verifier import main
from treeserve_verifier.config import VerifierConfig

SIZE = 4
BEGINNING = [(7 * i) % 200 + 10 for i in range(61)]


def verifier(model: Path, folder: Path, **settings: Any) -> AbstractAsyncContextManager[RunningVerifier]:
    """A pool of 65 blocks."""
    return running_verifier(model, folder, block_size=SIZE, kv_tokens=260, draft_always=False, **settings)


def others(n: int) -> list[int]:
    return [(11 * i + n) % 200 + 10 for i in range(150)]


def restore_for_nothing(blocks: BlockManager) -> None:
    """A tiny model computes a token in less time than a block takes to come back."""
    if blocks._tiers is not None:
        blocks._tiers._sizes = [replace(size, restore_ms=0.0) for size in blocks._tiers._sizes]


@pytest.mark.parametrize("where", ["pool", "host", "disk"])
async def test_a_turn_finds_its_history_and_says_what_a_cold_one_says(
    tiny_model: Path, tmp_path: Path, where: str
) -> None:
    tiers = {f"kv_{tier}_mb": int(tier == where) for tier in ("host", "disk")} | {"kv_disk_folder": tmp_path}
    async with verifier(tiny_model, tmp_path, **tiers) as running, RouterPeer(running.address) as router:
        restore_for_nothing(running.verifier.blocks)
        first = await router.generate(1, BEGINNING, speculate=False, tenant="somebody")
        history = [*BEGINNING, *first.token_ids]
        for handle in (2, 3) if where != "pool" else ():  # the pool is filled twice
            await router.generate(handle, others(handle), speculate=False, max_tokens=90)
        second = [*history, 50, 60, 70]
        warm = await router.generate(4, second, speculate=False, tenant="somebody")
        cold = await router.generate(5, second, speculate=False, tenant="somebody else")
        assert warm.token_ids == cold.token_ids
        assert (cached(first), cached(cold)) == (0, 0)
        assert cached(warm) == (len(history) - 1) // SIZE * SIZE
        assert (running.metric("treeserve_verifier_kv_restored_total") > 0) == (where != "pool")
        await until(lambda: running.verifier.loop.load().sequences == 0)
        running.check_all_blocks_free()


async def test_requests_that_begin_alike_share_while_they_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight with one long beginning in a pool that would hold three of them apart: none is preempted."""
    async with verifier(tiny_model, tmp_path, kv_host_mb=0) as running, RouterPeer(running.address) as router:
        await router.generate(0, BEGINNING, speculate=False, max_tokens=1, tenant="somebody")
        blocks, together = running.verifier.blocks, [0]
        monkeypatch.setattr(blocks, "commit", _counting(blocks, together))
        alike = {"speculate": False, "max_tokens": 8, "tenant": "somebody"}
        asked = [submission(i, [*BEGINNING, i], **alike) for i in range(1, 9)]
        router.outputs.update({message.handle: Output() for message in asked})
        outputs = [router.outputs[message.handle] for message in asked]
        await router.send(submit=verifier_pb2.Submit(sequences=asked))
        for output in outputs:
            await until(output.finished.is_set)
        assert max(together) == 8
        assert [cached(output) for output in outputs] == [60] * 8
        assert running.metric("treeserve_verifier_preemptions_total") == 0
        alone = await router.generate(9, [*BEGINNING, 3], speculate=False, max_tokens=8, tenant="somebody else")
        assert alone.token_ids == outputs[2].token_ids
        await until(lambda: running.verifier.loop.load().sequences == 0)
        running.check_all_blocks_free()


def _counting(blocks: BlockManager, together: list[int]) -> Callable[..., KvMoves]:
    """`commit`, which notes how many sequences hold blocks."""
    commit = blocks.commit

    def counted(*args: Any) -> KvMoves:
        together.append(len(blocks._sequences))
        return commit(*args)

    return counted


def cached(output: Output) -> int:
    assert output.end is not None
    return output.end.cached_tokens


def test_tiers_are_as_large_as_the_configuration_says(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "kv_host_mb": 2,
        "kv_disk_mb": 3,
        "kv_disk_folder": tmp_path,
        "kv_tokens": 128,
        "max_context_tokens": 64,
    }
    config = VerifierConfig(model_folder=tiny_model, model_name="tiny", dtype="float32", **settings)
    engine = main.load_engine(config)
    engine.thread.shutdown()
    block = engine.runner._kv.block_nbytes
    assert [size.slots for size in engine.runner.blocks._tiers._sizes] == [2_000_000 // block, 3_000_000 // block]


def test_host_memory_that_is_not_there_is_refused_on_a_gpu_too(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "available_bytes", lambda device: 10**10 if device == "cuda" else 10**8)
    config = VerifierConfig(model_folder=tiny_model, model_name="tiny", device="cuda", dtype="bfloat16", kv_host_mb=101)
    precision = main.Precision("bfloat16", "bfloat16", False, "")
    with pytest.raises(InvalidArgumentError, match="kv_host_mb: is more than this machine's 100 MB"):
        main._check_memory(config, precision)
