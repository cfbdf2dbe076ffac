"""Pausing, cached prefixes and load on a verifier's own streams: a tiny model, a real server, hand-made peers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from support.tree_shapes import SHAPES
from support.verifier_peers import Output, RouterPeer, SpeculatorPeer, running_verifier, until

from treeserve.common.v1 import common_pb2
from treeserve_core.tree import TokenTree

PROMPT = [10, 20, 30, 40, 50]
BATCH = {"service_class": common_pb2.SERVICE_CLASS_BATCH}
REALTIME = {"service_class": common_pb2.SERVICE_CLASS_REALTIME, "ttft_ms": 500.0, "tpot_ms": 30.0}


def options(handle: int) -> dict[str, Any]:
    """Sampled with a seed of its own; every third one is realtime, the others may be paused."""
    is_urgent = handle % 3 == 0
    return {
        "temperature": 1.0,
        "seed": handle,
        "repetition_penalty": 1.2,
        "max_tokens": 6 if is_urgent else 150,
        "level": REALTIME if is_urgent else BATCH,
        "submit": {"preemptible": not is_urgent},
    }


@pytest.mark.parametrize("drafted", [False, True])
async def test_heavy_pausing_changes_no_token(tiny_model: Path, tmp_path: Path, drafted: bool) -> None:
    rng = random.Random(3)
    prompts = [[*PROMPT * rng.randrange(1, 9), handle] for handle in range(24)]
    async with running_verifier(tiny_model, tmp_path) as calm, RouterPeer(calm.address) as router:
        expected = [(await router.generate(h, prompts[h], **options(h))).token_ids for h in range(24)]
        vocab = calm.engine.identity.vocab_size
    truth = {h: prompts[h] + expected[h] for h in range(24)}

    def draft(tokens: list[int], budget: int, seed: int) -> TokenTree | None:
        return SHAPES["scatter"](tokens[-1], truth[seed][len(tokens) :], budget, vocab, rng) if drafted else None

    tight = {"max_sequences": 4, "reserved_sequences": 0, "kv_tokens": 320, "max_context_tokens": 200}
    async with running_verifier(tiny_model, tmp_path, **tight, draft_wait_ms=20.0) as busy:
        async with RouterPeer(busy.address) as router, SpeculatorPeer(busy, draft):
            outputs: dict[int, Output] = {}
            for handle in (h for h in range(24) if h % 3):
                outputs[handle] = await router.submit(handle, prompts[handle], **options(handle))
            for handle in range(0, 24, 3):
                outputs[handle] = await router.generate(handle, prompts[handle], **options(handle))
            await asyncio.wait_for(asyncio.gather(*(output.finished.wait() for output in outputs.values())), 60)
        assert busy.metric("treeserve_verifier_pauses_total") >= 4
        busy.check_all_blocks_free()
    assert [outputs[h].token_ids for h in range(24)] == expected


async def test_an_urgent_sequence_overtakes_a_full_verifier(tiny_model: Path, tmp_path: Path) -> None:
    places = {"max_sequences": 2, "reserved_sequences": 0}
    async with running_verifier(tiny_model, tmp_path, **places) as full, RouterPeer(full.address) as router:
        running = [
            await router.submit(h, PROMPT, max_tokens=200, level=BATCH, submit={"preemptible": True}) for h in (1, 2)
        ]
        await until(lambda: all(output.token_ids for output in running))
        await until(lambda: router.loads[-1].preemptible == 2)
        urgent = await router.submit(3, PROMPT, max_tokens=40, level=REALTIME)
        await until(lambda: (router.loads[-1].waiting, router.loads[-1].preemptible) == (1, 1))
        assert router.loads[-1].sequences == 3
        await asyncio.wait_for(urgent.finished.wait(), 10)
        assert not any(output.finished.is_set() for output in running)


@pytest.mark.parametrize("last", [REALTIME, BATCH])
async def test_all_places_are_offered_and_the_last_is_for_a_realtime_sequence(
    tiny_model: Path, tmp_path: Path, last: dict[str, Any]
) -> None:
    places = {"max_sequences": 2, "reserved_sequences": 1}
    async with running_verifier(tiny_model, tmp_path, **places) as running, RouterPeer(running.address) as router:
        assert router.welcome is not None and router.welcome.max_sequences == 3
        for handle, level in enumerate((BATCH, BATCH, last), 1):
            output = await router.submit(handle, PROMPT, max_tokens=200, level=level)
        await asyncio.wait_for(output.finished.wait(), 20)
        all_ran = any(load.sequences == 3 and load.waiting == 0 for load in router.loads)
        assert all_ran == (last is REALTIME)


async def test_the_load_says_how_fast_the_verifier_is(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        assert router.welcome is not None and router.welcome.block_size == 16
        await until(lambda: router.loads)
        assert router.loads[0].step_ms == 0.0 and router.loads[0].prefill_tokens_per_s == 0.0
        await router.generate(1, PROMPT * 20, max_tokens=20)
        await until(lambda: router.loads[-1].sequences == 0)
        load = router.loads[-1]
        assert 0.01 < load.step_ms < 1000.0 and load.prefill_tokens_per_s > 100.0
        assert load.waiting == load.preemptible == 0


async def test_a_sequence_says_how_much_of_its_prompt_was_there(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        first = await router.generate(1, PROMPT * 20, max_tokens=8, tenant="somebody")
        again = await router.generate(2, PROMPT * 20, max_tokens=8, tenant="somebody")
        others = await router.generate(3, PROMPT * 20, max_tokens=8, tenant="somebody else")
        assert first.token_ids == again.token_ids == others.token_ids
        cached = [output.end.cached_tokens for output in (first, again, others) if output.end is not None]
        assert cached == [0, 96, 0]
        assert running.metric("treeserve_verifier_cached_tokens_total") == 96
        nobody = [await router.generate(handle, PROMPT * 20, max_tokens=2) for handle in (4, 5)]
        assert all(output.end is not None and output.end.cached_tokens == 0 for output in nobody)


async def test_what_cannot_be_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        for handle, submit in enumerate(({"waited_ms": -1.0}, {"waited_ms": float("nan")}, {"session_id": "x" * 129})):
            output = await router.generate(handle, PROMPT, submit=submit)
            assert output.end is not None and output.end.status.code == code_pb2.INVALID_ARGUMENT


async def test_targets_that_were_met_are_counted_by_class(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        easy = {"service_class": common_pb2.SERVICE_CLASS_REALTIME, "ttft_ms": 1e6, "tpot_ms": 1e6}
        hard = {"service_class": common_pb2.SERVICE_CLASS_INTERACTIVE, "ttft_ms": 500.0, "tpot_ms": 1e-6}
        await router.generate(1, PROMPT, level=easy)
        await router.generate(2, PROMPT, level=hard, submit={"waited_ms": 1000.0})
        await router.generate(3, PROMPT)

        def targets(service_class: str, target: str, met: str) -> float | None:
            labels = {"service_class": service_class, "target": target, "met": met}
            return running.registry.get_sample_value("treeserve_verifier_targets_total", labels)

        await until(lambda: targets("interactive", "tpot", "false") is not None)
        assert targets("realtime", "ttft", "true") == targets("realtime", "tpot", "true") == 1
        assert targets("interactive", "ttft", "false") == 1 and targets("interactive", "ttft", "true") is None
        assert targets("standard", "ttft", "true") is None
        assert running.metric("treeserve_verifier_emission_gap_seconds_count") > 0
