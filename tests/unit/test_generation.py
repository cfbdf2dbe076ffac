"""A generation's own logic, with its verifier played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry
from support.router_rig import load_tokenizer
from support.waiting import until

from treeserve_core.errors import TreeserveError, UnavailableError
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.affinity import Affinity
from treeserve_router.generation import Finished, Generation, GenerationEvent, GenerationParts, Started
from treeserve_router.hedging import Hedger
from treeserve_router.mailbox import Ended, Lost, Placed, Stranded, Tokens
from treeserve_router.metrics import RouterMetrics
from treeserve_router.queue import Ticket
from treeserve_router.visible_output import TokenChunk
from treeserve_text.tokenizer import Tokenizer


class RecordingDispatcher:
    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.withdrawn: list[Ticket] = []

    def submit(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        self.withdrawn.append(ticket)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_tokenizer(folder)


@pytest.fixture
def dispatcher() -> RecordingDispatcher:
    return RecordingDispatcher()


def start(
    dispatcher: RecordingDispatcher,
    tokenizer: Tokenizer,
    max_tokens: int = 6,
    top_log_probs: int | None = None,
    stop_strings: tuple[str, ...] = (),
) -> AsyncGenerator[GenerationEvent, None]:
    request = RouterRequest(
        request_id="r",
        prompt_token_ids=(5,),
        generated_token_ids=(),
        sampling=SamplingParams(seed=1, top_log_probs=top_log_probs),
        stopping=StoppingCriteria(max_tokens=max_tokens, stop_strings=stop_strings),
        limits=SequenceLimits(),
    )
    metrics = RouterMetrics(CollectorRegistry())
    hedger = Hedger(dispatcher, metrics, 1.0, 0, asyncio.get_running_loop().time)  # type: ignore[arg-type]
    parts = GenerationParts(dispatcher, hedger, tokenizer, metrics, max_replays=2)  # type: ignore[arg-type]
    return Generation(request, parts, Affinity(), INVALID_SPAN).events()


async def rest(events: AsyncGenerator[GenerationEvent, None]) -> list[GenerationEvent]:
    return [event async for event in events]


async def test_what_gathers_for_a_slow_client_is_one_chunk(
    dispatcher: RecordingDispatcher, tokenizer: Tokenizer
) -> None:
    events = start(dispatcher, tokenizer)
    assert isinstance(await anext(events), Started)
    mailbox = dispatcher.tickets[0].mailbox
    mailbox.put(Placed("v"))
    for offset in range(6):
        mailbox.put(Tokens(offset, (70 + offset,)))
    mailbox.put(Ended(FinishReason.LENGTH))
    chunk, finished = await rest(events)
    assert chunk == TokenChunk(0, tuple(range(70, 76)), tokenizer.decode(range(70, 76)))
    assert finished == Finished(FinishReason.LENGTH, 1, 6, SpeculationStats())
    assert dispatcher.withdrawn == dispatcher.tickets


async def test_counts_of_replayed_sequences_add_up(dispatcher: RecordingDispatcher, tokenizer: Tokenizer) -> None:
    events = start(dispatcher, tokenizer, max_tokens=3)
    await anext(events)
    box = dispatcher.tickets[0].mailbox
    box.put(Tokens(0, (70, 71)))
    stats = SpeculationStats(steps=2, drafted=5, accepted=1, accepted_per_depth=[1])
    box.put(Ended(None, stats=stats, error=UnavailableError("draining")))
    assert isinstance(await anext(events), TokenChunk)
    more = asyncio.ensure_future(anext(events))
    await until(lambda: len(dispatcher.tickets) == 2)
    stats = SpeculationStats(steps=1, drafted=4, accepted=3, accepted_per_depth=[2, 1])
    box = dispatcher.tickets[1].mailbox
    box.put(Tokens(2, (72,)))
    box.put(Ended(FinishReason.LENGTH, stats=stats))
    assert isinstance(await more, TokenChunk)
    finished = await anext(events)
    assert isinstance(finished, Finished)
    assert finished.stats == SpeculationStats(steps=3, drafted=9, accepted=4, accepted_per_depth=[3, 1])
    replay = dispatcher.tickets[1]
    assert (replay.generated_token_ids, replay.is_replay) == ((70, 71), True)


@pytest.mark.parametrize(
    "tokens",
    [
        Tokens(1, (72,)),  # a gap
        Tokens(0, (72,)),  # right offset, but the log-probabilities it was asked for are missing
        Tokens(0, (10**6,), (PositionLogProbs(1, -1.0),)),  # no such token
        Tokens(0, (70, 71), (PositionLogProbs(70, -1.0), PositionLogProbs(71, -1.0))),  # more than were asked for
    ],
)
async def test_tokens_that_cannot_be_right_are_replayed(
    dispatcher: RecordingDispatcher, tokenizer: Tokenizer, tokens: Tokens
) -> None:
    events = start(dispatcher, tokenizer, max_tokens=1, top_log_probs=0)
    await anext(events)
    dispatcher.tickets[0].mailbox.put(tokens)
    async with aclosing(events):
        next_event = asyncio.ensure_future(anext(events))
        await until(lambda: len(dispatcher.tickets) == 2)
        assert dispatcher.withdrawn == dispatcher.tickets[:1]
        assert dispatcher.tickets[1].generated_token_ids == ()
        dispatcher.tickets[1].mailbox.put(Tokens(0, (70,), (PositionLogProbs(70, -1.0),)))
        dispatcher.tickets[1].mailbox.put(Ended(FinishReason.LENGTH))
        chunk = await next_event
    assert isinstance(chunk, TokenChunk)
    assert chunk.token_ids == (70,)


async def test_failures_without_progress_end_the_request(dispatcher: RecordingDispatcher, tokenizer: Tokenizer) -> None:
    events = start(dispatcher, tokenizer)
    await anext(events)
    for offset in range(4):  # progress in between: no limit
        chunk = asyncio.ensure_future(anext(events))
        await until(lambda offset=offset: len(dispatcher.tickets) == offset + 1)
        dispatcher.tickets[-1].mailbox.put(Tokens(offset, (70,)))
        dispatcher.tickets[-1].mailbox.put(Lost("v", "gone"))
        assert isinstance(await chunk, TokenChunk)
    failing = asyncio.ensure_future(anext(events))
    for tries in (5, 6):  # two more after the fourth loss
        await until(lambda tries=tries: len(dispatcher.tickets) == tries)
        dispatcher.tickets[-1].mailbox.put(Lost("v", "gone"))
    with pytest.raises(UnavailableError, match="gone"):
        await failing
    assert dispatcher.withdrawn == dispatcher.tickets


async def test_an_output_that_was_complete_when_its_verifier_died_is_not_replayed(
    dispatcher: RecordingDispatcher, tokenizer: Tokenizer
) -> None:
    for last, reason in ((71, FinishReason.LENGTH), (tokenizer.eos_token_ids[0], FinishReason.STOP)):
        events = start(dispatcher, tokenizer, max_tokens=2)
        await anext(events)
        dispatcher.tickets[-1].mailbox.put(Tokens(0, (70, last)))
        dispatcher.tickets[-1].mailbox.put(Lost("v", "gone"))
        finished = (await rest(events))[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.completion_tokens) == (reason, 2)
    assert len(dispatcher.tickets) == 2


@pytest.mark.parametrize("error", [TreeserveError("internal error"), UnavailableError("nobody")])
async def test_final_failures_are_raised(
    dispatcher: RecordingDispatcher, tokenizer: Tokenizer, error: TreeserveError
) -> None:
    events = start(dispatcher, tokenizer)
    await anext(events)
    final = Stranded() if isinstance(error, UnavailableError) else Ended(None, error=error)
    dispatcher.tickets[0].mailbox.put(final)
    with pytest.raises(type(error)):
        await rest(events)
    assert len(dispatcher.tickets) == 1


async def test_a_stop_string_at_the_last_allowed_token_is_a_stop(
    dispatcher: RecordingDispatcher, tokenizer: Tokenizer
) -> None:
    ids = tuple(token_id for char in "abST" for token_id in tokenizer.encode(char))
    events = start(dispatcher, tokenizer, max_tokens=4, stop_strings=("ST",))
    await anext(events)
    dispatcher.tickets[0].mailbox.put(Tokens(0, ids))
    dispatcher.tickets[0].mailbox.put(Ended(FinishReason.LENGTH))
    chunk, finished = await rest(events)
    assert isinstance(chunk, TokenChunk)
    assert chunk.text == "ab"
    assert finished == Finished(FinishReason.STOP, 1, 2, SpeculationStats(), "ST")
