"""A stream whose one direction breaks ends in both, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.sequences import make_config

from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import OverloadedError, UnavailableError
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity
from treeserve_router.decode_stream import DecodeStream
from treeserve_verifier.decode_stream import DecodeHandler
from treeserve_verifier.decode_stream import DecodeStream as VerifierDecodeStream
from treeserve_verifier.draft_stream import DraftHandler
from treeserve_verifier.load import Load
from treeserve_wire import codec

MODEL = ModelIdentity("m", "0" * 64, 100, 100, (2,))
LOAD = Load(0, 10, 1, False, 0, 0, 0.0, 0.0, 0.0, 0.0)


class BrokenWriter:
    """A call that takes the welcome and then nothing any more."""

    def __init__(self) -> None:
        self.written = 0

    async def write(self, frame: object) -> None:
        self.written += 1
        if self.written > 1:
            raise OSError("cannot be written")


async def hello_and_silence(hello: object) -> AsyncIterator[Any]:
    yield hello
    await asyncio.get_running_loop().create_future()


def decode_handler(attached: list[object]) -> tuple[DecodeHandler, object]:
    loop: Any = SimpleNamespace(load=lambda: LOAD)
    hello = verifier_pb2.DecodeHello(protocol_version=PROTOCOL_VERSION, router_id="r", initial_credit=1)
    handler = DecodeHandler(make_config(), MODEL, loop, SimpleNamespace(), 10)  # type: ignore[arg-type]
    return handler, verifier_pb2.DecodeRequest(hello=hello)


def draft_handler(attached: list[object]) -> tuple[DraftHandler, object]:
    def attach(name: str, sources: object, outbox: Any, *_: object) -> object:
        attached.append(outbox)
        outbox.release(1)  # something to write
        return SimpleNamespace(name=name, sources=sources, wants_features=False)

    loop: Any = SimpleNamespace(
        attach=attach, detach=lambda _: attached.clear(), prices=lambda: SimpleNamespace(token_s=1.0, node=0.0),
        feature_shape=None,
    )  # fmt: skip
    hello = verifier_pb2.DraftHello(
        protocol_version=PROTOCOL_VERSION,
        speculator_id="s",
        model=codec.identity_to_proto(MODEL),
        sources=["ngram"],
        initial_credit=1,
    )
    metrics: Any = SimpleNamespace()
    return DraftHandler(make_config(), MODEL, loop, metrics), verifier_pb2.DraftRequest(hello=hello)


@pytest.mark.parametrize("make", [decode_handler, draft_handler])
async def test_a_verifiers_stream_that_cannot_be_written_ends(
    make: Callable[[list[object]], tuple[Any, object]],
) -> None:
    attached: list[object] = []
    handler, hello = make(attached)
    with pytest.raises(OSError, match="cannot be written"):
        async with asyncio.timeout(5):
            await handler.serve(hello_and_silence(hello), BrokenWriter())
    assert not attached and not getattr(handler, "_streams", None)


class EndedCall:
    """A call that has ended: nothing can be written, and reading says so a moment later."""

    async def write(self, frame: object) -> None:
        raise asyncio.InvalidStateError

    async def read(self) -> object:
        await asyncio.sleep(0.05)
        return None


async def test_a_router_says_why_a_call_ended_that_it_could_not_write_to() -> None:
    call, offer = EndedCall(), SimpleNamespace(verifier_id="v")
    stream = DecodeStream("address", call, offer, 4, lambda: None)  # type: ignore[arg-type]
    stream.suspect()  # something to write
    with pytest.raises(UnavailableError, match="closed the stream"):
        async with asyncio.timeout(5):
            await stream.run()


async def test_the_span_of_a_sequence_that_is_refused_ends() -> None:
    ended: list[bool] = []
    sequence = SimpleNamespace(span=SimpleNamespace(end=lambda: ended.append(True)))

    def full(_: object) -> None:
        raise OverloadedError("full", 1.0)

    loop, intake = SimpleNamespace(submit=full), SimpleNamespace(accept=lambda *_: sequence)
    stream = VerifierDecodeStream(loop, intake, "router", 1, 0.0)  # type: ignore[arg-type]
    stream.submit(
        verifier_pb2.SubmitSequence(handle=1, prompt_token_ids=[5], stopping=common_pb2.StoppingCriteria(max_tokens=9))
    )
    assert ended == [True]
