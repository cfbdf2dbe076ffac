"""What a verifier tells routers when it drains or fails, and when they drop a sequence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.rpc import code_pb2, error_details_pb2
from support.verifier_peers import RouterPeer, RunningVerifier, running_verifier, until

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import HandedBackError
from treeserve_wire.status import from_status

PROMPT = [10, 20, 30, 40, 50]


async def test_draining_finishes_streams_and_refuses_new_ones(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as draining, RouterPeer(draining.address) as router:
        output = await router.submit(1, PROMPT, max_tokens=100)
        await until(lambda: output.token_ids)
        drain = asyncio.create_task(draining.verifier.loop.drain(20.0))
        await until(lambda: router.loads and router.loads[-1].draining)
        late = await router.generate(2, PROMPT)
        assert late.end is not None and late.end.status.code == code_pb2.UNAVAILABLE
        await asyncio.wait_for(output.finished.wait(), 30)
        await drain
    assert len(output.token_ids) == 100


async def test_what_does_not_finish_in_time_is_handed_back(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as draining:
        async with RouterPeer(draining.address) as router:
            outputs = [await router.submit(h, PROMPT, max_tokens=250) for h in range(6)]
            await until(lambda: all(output.token_ids for output in outputs))
            await draining.verifier.loop.drain(0.0)
            await asyncio.wait_for(asyncio.gather(*(output.finished.wait() for output in outputs)), 5)
        draining.check_all_blocks_free()
    assert {o.end.status.code for o in outputs if o.end is not None} == {code_pb2.UNAVAILABLE}


async def test_a_failed_forward_pass_hands_its_sequences_back_and_leaves_nothing(
    running: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: object) -> None:
        raise RuntimeError("out of memory")

    async with RouterPeer(running.address) as router:
        with monkeypatch.context() as broken:
            broken.setattr(running.engine.runner, "forward", fail)
            outputs = await asyncio.gather(*(router.generate(h, PROMPT) for h in range(3)))
        assert {o.end.status.code for o in outputs if o.end is not None} == {code_pb2.UNAVAILABLE}
        assert "memory" not in str(outputs[0].end), "the peer is not told our internals"
        assert len((await router.generate(9, PROMPT)).token_ids) == 24


async def test_a_cancel_is_answered_whatever_it_changes(tiny_model: Path, tmp_path: Path) -> None:
    """A router that thinks the verifier dead must hear of it again, even if nothing changed by then."""
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        await until(lambda: router.loads)
        for handle in (1, 2):
            before = len(router.loads)
            await router.send(cancel=verifier_pb2.Cancel(handles=[handle]))
            await until(lambda before=before: len(router.loads) > before)
            assert router.loads[-1].sequences == 0


async def test_what_is_left_of_a_drain_is_handed_back(tiny_model: Path, tmp_path: Path) -> None:
    """Both what still runs and what came too late, with a status that is no failure."""
    async with running_verifier(tiny_model, tmp_path) as draining, RouterPeer(draining.address) as router:
        running = await router.submit(1, [3, 4, 5], max_tokens=200)
        await until(lambda: running.token_ids)
        await draining.verifier.loop.drain(0.0)
        late = await router.submit(2, [3, 4, 5])
        await until(lambda: running.end and late.end)
        for output in (running, late):
            assert output.end is not None
            assert isinstance(from_status(output.end.status), HandedBackError)
            info = error_details_pb2.ErrorInfo()
            assert output.end.status.details[0].Unpack(info)
            assert info.reason == "HANDED_BACK"
        await until(lambda: draining.verifier.blocks.free_blocks == draining.verifier.blocks.total_blocks)
        draining.check_all_blocks_free()
