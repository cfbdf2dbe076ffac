"""Tokens gather for a while before they leave a verifier; first tokens and ends do not wait."""

import asyncio
from types import SimpleNamespace

from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.outcome import FinishReason
from treeserve_verifier.decode_stream import DecodeStream
from treeserve_verifier.sequence import Emission

HANDLE = 7


class Rig:
    """A stream whose sequence emits when the test says so, and the frames that left it."""

    def __init__(self, interval_s: float) -> None:
        intake = SimpleNamespace(accept=self._accept)
        loop = SimpleNamespace(submit=lambda sequence: None, cancel=lambda sequence: None)
        self.stream = DecodeStream(loop, intake, "router", 100, interval_s)
        self.frames: list[list[int]] = []
        self.stream.submit(
            verifier_pb2.SubmitSequence(
                handle=HANDLE,
                prompt_token_ids=[5],
                generated_token_ids=[1, 2],
                stopping=common_pb2.StoppingCriteria(max_tokens=9),
            )
        )
        self.reader = asyncio.create_task(self._read())

    def _accept(self, submission, emit, constraint):
        self.emit = emit
        return object()

    async def _read(self) -> None:
        async for frame in self.stream.frames():
            self.frames.append([t for s in frame.tokens.sequences for t in s.token_ids])

    async def step(self, offset: int, finish_reason: FinishReason | None = None) -> None:
        """One token, as the verify loop emits it."""
        self.emit(Emission(offset, (100 + offset,), finish_reason=finish_reason))
        self.stream.flush()
        for _ in range(5):
            await asyncio.sleep(0)


async def test_the_first_token_leaves_at_once_and_others_gather_until_the_interval_is_over():
    r = Rig(0.2)
    await r.step(2)
    assert r.frames == [[102]]
    await r.step(3)
    await r.step(4)
    assert r.frames == [[102]]
    await asyncio.sleep(0.3)  # without another step
    assert r.frames == [[102], [103, 104]]
    r.reader.cancel()


async def test_the_end_leaves_at_once_with_all_that_gathered():
    r = Rig(60.0)
    await r.step(2)
    await r.step(3)
    await r.step(4, FinishReason.LENGTH)
    assert r.frames == [[102], [103, 104]]
    r.reader.cancel()


async def test_without_an_interval_every_step_leaves():
    r = Rig(0.0)
    for offset in (2, 3, 4):
        await r.step(offset)
    assert r.frames == [[102], [103], [104]]
    r.reader.cancel()
