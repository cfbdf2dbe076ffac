"""The router's side of the Decode stream, against a scripted verifier."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.fake_verifier import MODEL_NAME, FakeVerifier, fake_verifiers, pseudo_random
from support.waiting import until

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve_core.errors import InvalidArgumentError, OverloadedError, TreeserveError, UnavailableError
from treeserve_core.identity import ModelIdentity
from treeserve_core.outcome import FinishReason
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.batcher import Batcher
from treeserve_router.mailbox import Ended, Lost, Mailbox, Placed, SequenceEvent, Tokens
from treeserve_router.placement import VerifierState
from treeserve_router.pool import VerifierPool
from treeserve_router.queue import Ticket
from treeserve_router.verifier_link import VerifierLink
from treeserve_text.tokenizer import Tokenizer

TOKEN_CREDIT = 4


@pytest.fixture
async def verifier(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[FakeVerifier]:
    verifier = FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250))
    async with fake_verifiers(verifier):
        yield verifier


def identity(tokenizer: Tokenizer) -> ModelIdentity:
    return ModelIdentity(
        MODEL_NAME, tokenizer.hash, tokenizer.vocab_size, tokenizer.vocab_size, tokenizer.eos_token_ids
    )


@asynccontextmanager
async def running_link(verifier: FakeVerifier, **changes: Any) -> AsyncIterator[VerifierLink]:
    model = replace(identity(verifier.tokenizer), **changes)
    link = VerifierLink(verifier.address, model, "test", TOKEN_CREDIT, lambda: None, random.Random(1))
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ticket(max_tokens: int = 6, prompt: tuple[int, ...] = (5, 6, 7), generated: tuple[int, ...] = ()) -> Ticket:
    request = RouterRequest(
        request_id="r",
        prompt_token_ids=prompt,
        generated_token_ids=(),
        sampling=SamplingParams(seed=1),
        stopping=StoppingCriteria(max_tokens=max_tokens),
        limits=SequenceLimits(),
    )
    return Ticket(request, generated, Mailbox())


async def collect(ticket: Ticket) -> list[SequenceEvent]:
    """All events up to the last one."""
    events: list[SequenceEvent] = []
    async with asyncio.timeout(10):
        while not events or not isinstance(events[-1], Ended | Lost):
            events.extend(await ticket.mailbox.take())
    return events


def token_ids(events: list[SequenceEvent]) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


async def test_a_sequence_from_submission_to_end(verifier: FakeVerifier) -> None:
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        assert verifier.hello == pb.DecodeHello(protocol_version=1, router_id="test", initial_credit=TOKEN_CREDIT)
        mine = ticket(generated=(9, 8))
        link.submit(mine)
        assert not link.is_idle
        events = await collect(mine)
        assert events[0] == Placed("a.sock")
        assert [e.offset for e in events if isinstance(e, Tokens)] == [2, 3, 4, 5]
        assert isinstance(events[-1], Ended)
        assert events[-1].reason is FinishReason.LENGTH
        assert events[-1].stats is not None
        assert events[-1].stats.steps == 4
        assert link.is_idle
        submitted = verifier.submits[0]
        assert list(submitted.prompt_token_ids) == [5, 6, 7]
        assert list(submitted.generated_token_ids) == [9, 8]
        assert submitted.sampling.seed == 1


async def test_credit_is_given_back_as_frames_are_read(verifier: FakeVerifier) -> None:
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        mine = ticket(max_tokens=50)
        link.submit(mine)
        await collect(mine)
        assert verifier.frames == 50
        await until(lambda: 50 - TOKEN_CREDIT < verifier.credit <= 50)


async def test_handles_are_not_reused_while_they_live(verifier: FakeVerifier) -> None:
    verifier.hold_at = 1
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        tickets = [ticket() for _ in range(10)]
        for each in tickets:
            link.submit(each)
        await until(lambda: len(verifier.submits) == 10)
        assert len({m.handle for m in verifier.submits}) == 10
        verifier.hold_at = None
        outputs = [token_ids(await collect(each)) for each in tickets]
        assert all(output == outputs[0] and len(output) == 6 for output in outputs)


async def test_cancelling_reaches_the_verifier_once(verifier: FakeVerifier) -> None:
    verifier.hold_at = 1
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        mine, never_sent = ticket(), ticket()
        link.submit(mine)
        await until(lambda: verifier.frames == 1)
        link.submit(never_sent)
        link.cancel(never_sent)
        link.cancel(mine)
        link.cancel(mine)
        await until(lambda: verifier.cancelled)
        assert link.is_idle
        assert verifier.cancelled == [verifier.submits[0].handle]
        assert len(verifier.submits) == 1


def has_room(state: VerifierState) -> bool:
    """For a ticket, where no class reserves places."""
    return Batcher({}).has_room(ticket(), state)


async def test_load_reports_and_room(verifier: FakeVerifier) -> None:
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        await verifier.report(sequences=3, free_blocks=2, total_blocks=8)
        await until(lambda: link.state is not None and link.state.total_blocks == 8)
        state = link.state
        assert state is not None
        assert (state.sequences, state.free_blocks, has_room(state)) == (3, 2, True)
        verifier.hold_at = 1
        link.submit(ticket())
        assert link.state is not None
        assert (link.state.sequences, has_room(link.state)) == (4, False)  # counted before the next report
        await verifier.report(sequences=1, free_blocks=0, total_blocks=8)
        await until(lambda: link.state is not None and link.state.sequences == 1)
        assert not has_room(link.state)  # no block is free
        await verifier.report(free_blocks=8, total_blocks=8, draining=True)
        await until(lambda: link.state is not None and link.state.draining)
        assert not link.state.can_serve(ticket())


@pytest.mark.parametrize("error", [OverloadedError("full", 0.05), UnavailableError("draining")])
async def test_a_refusal_holds_off_for_a_while(verifier: FakeVerifier, error: TreeserveError) -> None:
    verifier.refuse = error
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        mine = ticket()
        link.submit(mine)
        (last,) = [event for event in await collect(mine) if isinstance(event, Ended)]
        assert isinstance(last.error, type(error))
        assert link.state is not None
        assert not has_room(link.state)
        await until(lambda: link.state is not None and has_room(link.state))


async def test_a_broken_stream_loses_its_sequences_and_comes_back(verifier: FakeVerifier) -> None:
    verifier.hold_at = 2
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        mine = ticket()
        link.submit(mine)
        await until(lambda: verifier.frames == 2)
        await verifier.kill()
        events = await collect(mine)
        assert len(token_ids(events)) == 2
        assert isinstance(events[-1], Lost)
        assert link.state is None
        late = ticket()
        link.submit(late)
        assert isinstance((await collect(late))[-1], Lost)
        await verifier.start()
        await until(lambda: link.state)
        assert verifier.connections == 2


async def test_a_submission_that_fits_no_message_harms_no_other(verifier: FakeVerifier) -> None:
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        huge, mine = ticket(prompt=(300,) * 600_000), ticket()
        link.submit(huge)
        link.submit(mine)
        (ended,) = await collect(huge)
        assert isinstance(ended, Ended)
        assert isinstance(ended.error, InvalidArgumentError)
        assert len(token_ids(await collect(mine))) == 6


async def test_many_long_submissions_share_no_oversize_frame(verifier: FakeVerifier) -> None:
    async with running_link(verifier) as link:
        await until(lambda: link.state)
        tickets = [ticket(prompt=(300,) * 200_000) for _ in range(4)]  # 0.4 MB each
        for each in tickets:
            link.submit(each)
        for each in tickets:
            assert len(token_ids(await collect(each))) == 6
        assert verifier.connections == 1


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"name": "other"}, "name differs"),
        ({"tokenizer_hash": "0" * 64}, "tokenizer_hash differs"),
        ({"vocab_size": 17}, "vocab_size differs"),
        ({"eos_token_ids": (1, 2)}, "eos_token_ids differs"),
    ],
)
async def test_another_model_is_refused(verifier: FakeVerifier, changes: dict[str, Any], what: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running_link(verifier, **changes) as link:
            await until(lambda: logs)
            assert link.state is None
    assert what in logs[0]["reason"]


@pytest.mark.parametrize(("field", "value"), [("protocol_version", 2), ("max_sequences", 0)])
async def test_an_unusable_welcome_is_refused(verifier: FakeVerifier, field: str, value: int) -> None:
    setattr(verifier.welcome, field, value)
    async with running_link(verifier) as link:
        await until(lambda: verifier.connections >= 2)
        assert link.state is None


async def test_a_pool_retires_links_after_their_last_sequence(
    verifier: FakeVerifier, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = FakeVerifier(tokenizer, f"unix:{tmp_path}/b.sock", verifier.script)

    def make_link(address: str, changed: Callable[[], None]) -> VerifierLink:
        return VerifierLink(address, identity(tokenizer), "test", TOKEN_CREDIT, changed, random.Random(1))

    pool = VerifierPool(make_link)
    async with fake_verifiers(other):
        pool.update([verifier.address])
        await pool.wait_serving()
        verifier.hold_at = 1
        mine = ticket()
        pool.link(verifier.address).submit(mine)
        await until(lambda: verifier.frames == 1)
        pool.update([other.address])
        await until(lambda: [state.verifier_id for state in pool.states()] == ["b.sock"])
        assert verifier.streams, "a retiring link keeps its stream"
        verifier.hold_at = None
        assert len(token_ids(await collect(mine))) == 6
        await until(lambda: not verifier.streams)
        pool.update([])
        await until(lambda: not other.streams and not pool.is_serving)
        await pool.close()
