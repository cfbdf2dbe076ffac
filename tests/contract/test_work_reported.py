"""What a verifier tells routers of its work and of its speculators'."""

from __future__ import annotations

import pytest
from support.verifier_peers import RouterPeer, RunningVerifier, SpeculatorPeer, tree_message
from support.waiting import until

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.tree import TokenTree


async def latest(router: RouterPeer) -> verifier_pb2.LoadReport:
    """A report that was asked for now."""
    seen = len(router.loads)
    await router.send(cancel=verifier_pb2.Cancel())
    await until(lambda: len(router.loads) > seen)
    return router.loads[-1]


async def test_work_grows_with_what_is_generated(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        idle = await latest(router)
        assert (idle.HasField("work_s"), idle.work_s) == (True, 0.0)  # nothing done is not nothing known
        await router.generate(1, [5, 6, 7], max_tokens=8)
        first = (await latest(router)).work_s
        await router.generate(2, [8, 9, 10], max_tokens=64)
        assert 0.0 < first < (await latest(router)).work_s - first


async def test_trees_that_were_drafted_together_took_their_time_once(running: RunningVerifier) -> None:
    trees = [tree_message(handle, 3, TokenTree.chain([1, 2])) for handle in (1, 2)]
    for tree in trees:
        tree.draft_us = 2_000_000
    async with RouterPeer(running.address) as router, SpeculatorPeer(running, lambda *_: None) as speculator:
        await speculator.propose(*trees)  # for nobody: the time was spent all the same
        await speculator.rejections.get()
        await speculator.propose(trees[0])
        await speculator.rejections.get()
        await speculator.rejections.get()
        assert (await latest(router)).drafting_s == pytest.approx(4.0)
