"""Trees with draws are large: they leave in frames that fit a message, each for one credit."""

from __future__ import annotations

import asyncio
from typing import Any

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.draws import Draws
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree
from treeserve_speculator.conversation import Conversation
from treeserve_wire.channel import MAX_MESSAGE_BYTES

SUPPORT = tuple(range(100_000, 100_064))
DRAWS = Draws((100_000,), SUPPORT, (1 / 64,) * 64)
CHAIN = TokenTree.chain([5, *[100_000] * 32])
LARGE = DraftProposal(9, TokenTree(CHAIN.token_ids, CHAIN.parents, draws=(*[DRAWS] * 32, None)))


class FakeCall:
    def __init__(self) -> None:
        self.frames: list[verifier_pb2.DraftRequest] = []

    async def write(self, frame: verifier_pb2.DraftRequest) -> None:
        self.frames.append(frame)


async def sent(num_trees: int, credit: int) -> tuple[list[verifier_pb2.DraftRequest], Conversation]:
    call: Any = FakeCall()
    conversation = Conversation(call, session=None, peer=None, initial_credit=credit)  # type: ignore[arg-type]
    conversation._outbox = dict.fromkeys(range(1, num_trees + 1), LARGE)
    conversation._wake.set()
    drafting = asyncio.create_task(conversation.draft())
    await asyncio.sleep(0.05)
    drafting.cancel()
    return call.frames, conversation


async def test_many_large_trees_take_several_frames() -> None:
    frames, conversation = await sent(100, credit=50)
    assert 1 < len(frames) < 10
    assert all(frame.ByteSize() < MAX_MESSAGE_BYTES for frame in frames)
    assert [p.handle for frame in frames for p in frame.proposals.proposals] == list(range(1, 101))
    assert sum(frame.ByteSize() for frame in frames) > MAX_MESSAGE_BYTES
    assert not conversation._outbox


async def test_without_credit_the_rest_waits() -> None:
    frames, conversation = await sent(100, credit=1)
    assert len(frames) == 1
    sent_handles = {p.handle for p in frames[0].proposals.proposals}
    assert conversation._outbox.keys() == set(range(1, 101)) - sent_handles
