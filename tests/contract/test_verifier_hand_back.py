"""What a verifier tells routers when it drains, and when they drop a sequence."""

from __future__ import annotations

from pathlib import Path

from google.rpc import error_details_pb2
from support.verifier_peers import RouterPeer, running_verifier, until

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import HandedBackError
from treeserve_wire.status import from_status


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
