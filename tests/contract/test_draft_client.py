"""The speculator's side of a Draft stream against a scripted verifier on loopback."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry
from support.waiting import until

from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_core.errors import HandshakeError, StaleBaseError
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity
from treeserve_core.tree import TokenTree
from treeserve_speculator.conversation import CREDIT_WINDOW, DraftPeer
from treeserve_speculator.draft_client import DraftClient, draft_hello
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.session import DraftSession
from treeserve_speculator.sources.base import DraftSource
from treeserve_speculator.sources.ngram import NgramSource
from treeserve_speculator.sources.recycling import RecyclingSource
from treeserve_speculator.sources.suffix import SuffixSource
from treeserve_wire.backoff import Backoff
from treeserve_wire.codec import identity_from_proto, proposal_from_proto
from treeserve_wire.server import ServiceServer
from treeserve_wire.status import abort, to_status

VOCAB = 100
EOS = 99
IDENTITY = ModelIdentity("tiny", "hash", VOCAB, 104, (EOS,))
TIMEOUT_S = 10.0
Update = verifier_pb2.DraftUpdate
Proposal = verifier_pb2.TreeProposal


class Stream:
    """One Draft call, driven by the test."""

    def __init__(self, context: Any, hello: verifier_pb2.DraftHello) -> None:
        self.hello = hello
        self.ended = asyncio.Event()
        self.refusal: Exception | None = None
        self.credit = 0  # what the speculator gave back
        self._context = context

    async def welcome(self, *, credit: int = 64, max_nodes: int = 33, max_depth: int = 8) -> None:
        await self.send(
            welcome=verifier_pb2.DraftWelcome(
                protocol_version=PROTOCOL_VERSION,
                verifier_id="v",
                max_nodes=max_nodes,
                max_depth=max_depth,
                initial_credit=credit,
            )
        )

    async def send(self, **frame: Any) -> None:
        await self._context.write(verifier_pb2.DraftResponse(**frame))

    async def update(self, **update: Any) -> None:
        await self.send(update=Update(**update))

    async def read(self) -> verifier_pb2.DraftRequest | None:
        """The next frame; None when the speculator closed its side."""
        frame = await asyncio.wait_for(self._context.read(), TIMEOUT_S)
        return None if frame is grpc.aio.EOF else frame

    async def proposals(self) -> dict[int, Proposal]:
        """The next trees, by handle; credit on the way is counted."""
        while True:
            frame = await self.read()
            assert frame is not None
            if frame.WhichOneof("frame") == "proposals":
                return {proposal.handle: proposal for proposal in frame.proposals.proposals}
            self.credit += frame.credit.frames

    def end(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.ended.set()


class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    def __init__(self) -> None:
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self._opened: list[Stream] = []

    async def Draft(self, requests: Any, context: Any) -> None:
        first = await context.read()
        stream = Stream(context, first.hello)
        self._opened.append(stream)
        await self.streams.put(stream)
        await stream.ended.wait()
        if stream.refusal is not None:
            await abort(context, stream.refusal)

    def end_all(self) -> None:
        for stream in self._opened:
            stream.end()

    async def next_stream(self, timeout_s: float = TIMEOUT_S) -> Stream:
        return await asyncio.wait_for(self.streams.get(), timeout_s)


class ScriptedSource:
    """Proposes by a function, which may block: it runs in the drafter's thread."""

    name = "scripted"
    wants_top_tokens = True

    def __init__(self, script: Callable[[DraftSequence, int], TokenTree | None]) -> None:
        self._script = script
        self.drawn: set[tuple[int, int]] = set()  # handle and committed length of every tree
        self.top_tokens: list[tuple[tuple[int, ...], ...]] = []

    def open(self, state: DraftSequence) -> None: ...

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Any) -> None:
        self.top_tokens.append(top_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        tree = self._script(state, budget)
        self.drawn.add((state.handle, len(state.tokens)))
        return tree

    def close(self, state: DraftSequence) -> None: ...


def next_tokens(state: DraftSequence, budget: int) -> TokenTree:
    """The chain last + 1, last + 2, ..."""
    last = state.tokens[-1]
    return TokenTree.chain([last + i for i in range(budget + 1)], [0.0] + [-0.1] * budget)


class Speculator:
    """A running client and what it counts."""

    def __init__(self, address: str, source: DraftSource, *more: DraftSource, refused_s: float = 30.0) -> None:
        self.registry = CollectorRegistry()
        metrics = SpeculatorMetrics(self.registry)
        drafter = Drafter(
            (source, *more),
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            limits=TreeLimits(64, 16),
            metrics=metrics,
        )
        self.executor = ThreadPoolExecutor(1)
        peer = DraftPeer(
            self.executor,
            lambda limits: DraftSession(drafter, limits, metrics, NoOpTracer()),
            draft_hello("s", IDENTITY, drafter),
            metrics,
        )
        self.client = DraftClient(address, peer, random.Random(1), Backoff(0.01, 0.05), refused_s)
        self.task = asyncio.create_task(self.client.run())

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"treeserve_speculator_{name}", labels) or 0.0

    async def stop(self) -> None:
        self.client.stop()
        await asyncio.wait_for(self.task, TIMEOUT_S)
        self.executor.shutdown()


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier()


async def serve(verifier: FakeVerifier, address: str) -> ServiceServer:
    server = ServiceServer(address, "treeserve.verifier.v1.VerifierService")
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server.grpc)
    await server.start()
    return server


@pytest.fixture
async def address(verifier: FakeVerifier, tmp_path: Path) -> AsyncIterator[str]:
    address = f"unix:{tmp_path}/v"
    server = await serve(verifier, address)
    yield address
    await server.drain(0)


StartSpeculator = Callable[..., Speculator]


@pytest.fixture
async def start(verifier: FakeVerifier, address: str) -> AsyncIterator[StartSpeculator]:
    started: list[Speculator] = []

    def start(*sources: DraftSource, **options: Any) -> Speculator:
        started.append(Speculator(address, *sources, **options))
        return started[-1]

    yield start
    for speculator in started:
        speculator.client.stop()
    verifier.end_all()
    for speculator in started:
        await speculator.stop()


def assignment(handle: int, token_ids: Sequence[int], budget: int = 3) -> verifier_pb2.Assignment:
    return verifier_pb2.Assignment(handle=handle, token_ids=token_ids, budget=budget, prompt_tokens=1)


def commit(handle: int, base: int, token_ids: Sequence[int], budget: int = 3, **more: Any) -> verifier_pb2.Commit:
    return verifier_pb2.Commit(handle=handle, base_committed_len=base, token_ids=token_ids, budget=budget, **more)


async def test_hello_names_model_sources_and_wishes(verifier: FakeVerifier, start: StartSpeculator) -> None:
    start(NgramSource(), SuffixSource(), RecyclingSource(VOCAB))
    hello = (await verifier.next_stream()).hello
    assert hello.protocol_version == PROTOCOL_VERSION
    assert identity_from_proto(hello.model) == IDENTITY
    assert list(hello.sources) == ["ngram", "suffix", "recycling"]
    assert hello.wants_top_tokens and hello.initial_credit == CREDIT_WINDOW


async def test_assignment_and_commits_are_answered_by_trees(verifier: FakeVerifier, start: StartSpeculator) -> None:
    source = ScriptedSource(next_tokens)
    speculator = start(source)
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5, 6]), assignment(2, [8], budget=0), assignment(3, [20])])
    trees = await stream.proposals()
    assert {handle: list(p.token_ids) for handle, p in trees.items()} == {1: [6, 7, 8, 9], 3: [20, 21, 22, 23]}
    assert trees[1].base_committed_len == 2 and list(trees[1].parents) == [-1, 0, 1, 2]
    assert list(trees[1].source_masks) == [0, 1, 1, 1] and len(trees[1].log_probs) == 4

    top = [verifier_pb2.TopTokens(token_ids=[7, 40]), verifier_pb2.TopTokens(token_ids=[30])]
    await stream.update(commits=[commit(1, 2, [7, 30], budget=1, top_tokens=top), commit(2, 1, [9], budget=2)])
    trees = await stream.proposals()
    assert {handle: list(p.token_ids) for handle, p in trees.items()} == {1: [30, 31], 2: [9, 10, 11]}
    assert trees[1].base_committed_len == 4
    assert ((7, 40), (30,)) in source.top_tokens
    assert speculator.count("sequences") == 3


async def test_released_sequences_are_forgotten(verifier: FakeVerifier, start: StartSpeculator) -> None:
    speculator = start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5]), assignment(2, [5])])
    await stream.proposals()
    await stream.update(released=[1, 77])
    await stream.update(commits=[commit(1, 1, [6]), commit(2, 1, [6])])
    assert list(await stream.proposals()) == [2]
    assert speculator.count("sequences") == 1 and speculator.count("protocol_errors_total") == 0


async def test_no_idea_is_answered_by_a_root_alone(verifier: FakeVerifier, start: StartSpeculator) -> None:
    start(ScriptedSource(lambda state, budget: None))
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5])])
    assert list((await stream.proposals())[1].token_ids) == [5]


@pytest.mark.parametrize(("max_nodes", "max_depth", "expected"), [(33, 2, [5, 6, 7]), (4, 9, [5, 6, 7, 8])])
async def test_verifier_limits_bound_every_tree(
    verifier: FakeVerifier, start: StartSpeculator, max_nodes: int, max_depth: int, expected: list[int]
) -> None:
    start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome(max_nodes=max_nodes, max_depth=max_depth)
    await stream.update(assignments=[assignment(1, [5], budget=30)])
    assert list((await stream.proposals())[1].token_ids) == expected


async def test_prices_bound_trees_until_others_come(verifier: FakeVerifier, start: StartSpeculator) -> None:
    start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    sizes = []
    for handle, price in enumerate((None, 0.7, None, 0.0)):
        prices = {} if price is None else {"prices": verifier_pb2.DraftPrices(token_us=4000.0, node=price)}
        await stream.update(assignments=[assignment(handle, [5], budget=8)], **prices)
        sizes.append(len((await stream.proposals())[handle].token_ids) - 1)
    assert sizes[0] == sizes[3] == 8 > sizes[1] == sizes[2]


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
async def test_what_is_no_price_ends_the_stream(verifier: FakeVerifier, start: StartSpeculator, price: float) -> None:
    start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5])], prices=verifier_pb2.DraftPrices(token_us=price))
    stream.end()
    await verifier.next_stream()


async def test_credit_is_given_back_as_updates_are_processed(verifier: FakeVerifier, start: StartSpeculator) -> None:
    start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome(credit=1000)
    await stream.update(assignments=[assignment(1, [5])])
    await stream.proposals()
    for base in range(1, CREDIT_WINDOW + 1):
        await stream.update(commits=[commit(1, base, [5])])
        await stream.proposals()
    assert CREDIT_WINDOW // 2 <= stream.credit <= CREDIT_WINDOW + 1


async def test_without_credit_only_the_newest_tree_waits(verifier: FakeVerifier, start: StartSpeculator) -> None:
    source = ScriptedSource(next_tokens)
    start(source)
    stream = await verifier.next_stream()
    await stream.welcome(credit=1)
    await stream.update(assignments=[assignment(1, [5]), assignment(2, [50])])
    assert set(await stream.proposals()) == {1, 2}
    await stream.update(commits=[commit(1, 1, [6])])
    await stream.update(commits=[commit(1, 2, [30])])
    await stream.update(commits=[commit(2, 1, [60])])
    await until(lambda: {(1, 3), (2, 2)} <= source.drawn)  # and none may be sent
    await stream.send(credit=verifier_pb2.Credit(frames=5))
    trees = await stream.proposals()
    assert {h: (p.base_committed_len, list(p.token_ids)) for h, p in trees.items()} == {
        1: (3, [30, 31, 32, 33]),
        2: (2, [60, 61, 62, 63]),
    }
    await stream.update(commits=[commit(1, 3, [31])])
    assert set(await stream.proposals()) == {1}, "each tree was sent once"


class GatedSource(ScriptedSource):
    """Blocks in its first `propose` until the test lets it go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        super().__init__(self._gated)

    def _gated(self, state: DraftSequence, budget: int) -> TokenTree:
        self.entered.set()
        assert self.go_on.wait(TIMEOUT_S)
        return next_tokens(state, budget)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, TIMEOUT_S)


async def test_commits_that_arrive_while_drafting_move_the_tree_along(
    verifier: FakeVerifier, start: StartSpeculator
) -> None:
    source = GatedSource()
    speculator = start(source)
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(handle, [start]) for handle, start in enumerate((5, 50, 70, 30), 1)])
    await source.wait_entered()
    # along its tree, away from it, gone, and along all of it: an empty tree would only get in the way of the next
    commits = [commit(1, 1, [6]), commit(2, 1, [90]), commit(4, 1, [31, 32, 33])]
    await stream.update(commits=commits, released=[3])
    rejection = verifier_pb2.Rejection(handle=1, status=to_status(StaleBaseError("late")))
    await stream.send(rejections=verifier_pb2.Rejections(rejections=[rejection]))
    # the stream is read while the source is busy
    await until(lambda: speculator.count("rejections_total", code="FAILED_PRECONDITION") == 1)
    source.go_on.set()
    stale = await stream.proposals()
    assert {h: (p.base_committed_len, list(p.token_ids)) for h, p in stale.items()} == {1: (2, [6, 7, 8])}
    assert speculator.count("late_trees_total") == 3
    fresh = await stream.proposals()
    assert {h: p.token_ids[0] for h, p in fresh.items()} == {1: 6, 2: 90, 4: 33}


async def test_waiting_trees_that_nobody_wants_any_more_are_not_sent(
    verifier: FakeVerifier, start: StartSpeculator
) -> None:
    source = ScriptedSource(next_tokens)
    speculator = start(source)
    stream = await verifier.next_stream()
    await stream.welcome(credit=1)
    await stream.update(assignments=[assignment(9, [1])])
    await stream.proposals()
    await stream.update(assignments=[assignment(handle, [5]) for handle in (1, 2, 3)])
    await until(lambda: {(1, 1), (2, 1), (3, 1)} <= source.drawn)  # and wait for credit
    await stream.update(commits=[commit(1, 1, [6], budget=0)], released=[2])
    await stream.send(credit=verifier_pb2.Credit(frames=1))
    assert set(await stream.proposals()) == {3}
    assert speculator.count("late_trees_total") == 2


async def test_a_commit_out_of_step_drops_its_sequence_alone(verifier: FakeVerifier, start: StartSpeculator) -> None:
    speculator = start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5]), assignment(2, [50])])
    await stream.proposals()
    await stream.update(commits=[commit(1, 7, [6]), commit(2, 1, [51])])
    assert set(await stream.proposals()) == {2}
    await stream.update(commits=[commit(1, 1, [6]), commit(2, 2, [52])])
    assert set(await stream.proposals()) == {2}
    assert speculator.count("protocol_errors_total") == 1


MALFORMED = {
    "no tokens": assignment(1, []),
    "padding id": assignment(1, [VOCAB]),
    "prompt longer than all": verifier_pb2.Assignment(handle=1, token_ids=[5], prompt_tokens=2, budget=3),
    "impossible temperature": verifier_pb2.Assignment(
        handle=1, token_ids=[5], budget=3, sampling={"temperature": -1.0}
    ),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_assignment_harms_no_other(
    verifier: FakeVerifier, start: StartSpeculator, malformed: verifier_pb2.Assignment
) -> None:
    speculator = start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[malformed, assignment(2, [50])])
    assert set(await stream.proposals()) == {2}
    await stream.update(commits=[commit(1, 1, [5]), commit(2, 1, [VOCAB]), commit(3, 1, [5])])
    await stream.update(assignments=[assignment(4, [50])])
    assert set(await stream.proposals()) == {4}
    assert speculator.count("protocol_errors_total") == 2 and speculator.count("sequences") == 1


async def test_rejections_are_counted(verifier: FakeVerifier, start: StartSpeculator) -> None:
    speculator = start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    refused = verifier_pb2.Rejection(handle=1)
    refused.status.code = code_pb2.FAILED_PRECONDITION
    await stream.send(rejections=verifier_pb2.Rejections(rejections=[refused, refused]))
    await stream.update(assignments=[assignment(1, [5])])
    await stream.proposals()
    assert speculator.count("rejections_total", code="FAILED_PRECONDITION") == 2


async def test_a_broken_frame_ends_the_stream_and_a_new_one_opens(
    verifier: FakeVerifier, start: StartSpeculator
) -> None:
    start(ScriptedSource(next_tokens))
    for break_stream in (lambda s: s.welcome(), lambda s: s.send()):
        stream = await verifier.next_stream()
        await stream.welcome()
        await break_stream(stream)
        stream.end()
    await verifier.next_stream()


async def test_reconnects_after_ends_and_errors_with_fresh_sequences(
    verifier: FakeVerifier, start: StartSpeculator
) -> None:
    speculator = start(ScriptedSource(next_tokens))
    for error in (None, RuntimeError("boom"), TimeoutError("slow")):
        stream = await verifier.next_stream()
        await stream.welcome()
        await stream.update(assignments=[assignment(1, [5])])
        assert set(await stream.proposals()) == {1}
        stream.end(error)
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(commits=[commit(1, 1, [6])], assignments=[assignment(2, [7])])
    assert set(await stream.proposals()) == {2}, "handles end with their stream"
    assert speculator.count("sequences") == 1 and speculator.count("streams") == 1


async def test_finds_a_verifier_that_comes_later(verifier: FakeVerifier, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/late"
    speculator = Speculator(address, ScriptedSource(next_tokens))
    await asyncio.sleep(0.2)
    server = await serve(verifier, address)
    stream = await verifier.next_stream()
    await stream.welcome()
    await server.drain(0)
    server = await serve(verifier, address)
    await verifier.next_stream()
    await speculator.stop()
    await server.drain(0)


async def test_a_refused_handshake_is_retried_slowly(verifier: FakeVerifier, start: StartSpeculator) -> None:
    start(ScriptedSource(next_tokens), refused_s=0.5)
    (await verifier.next_stream()).end(HandshakeError("tokenizer_hash differs"))
    with pytest.raises(TimeoutError):
        await verifier.next_stream(timeout_s=0.3)
    await verifier.next_stream()


def test_backoff_doubles_to_its_limit_with_jitter() -> None:
    backoff, rng = Backoff(), random.Random(1)
    for failures, base in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.5), (10_000, 0.5)):
        waits = [backoff.wait_s(failures, rng) for _ in range(50)]
        assert base / 2 <= min(waits) < max(waits) <= base


async def test_stop_closes_the_stream_from_our_side(
    verifier: FakeVerifier, start: StartSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeserve_speculator.draft_client._STOP_GRACE_S", 2 * TIMEOUT_S)  # after which it is cut
    speculator = start(ScriptedSource(next_tokens))
    stream = await verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5])])
    await stream.proposals()
    speculator.client.stop()
    assert await stream.read() is None
    stream.end()
    await asyncio.wait_for(speculator.task, TIMEOUT_S)
    assert speculator.count("sequences") == 0 and speculator.count("streams") == 0


async def test_stop_does_not_wait_for_a_verifier_that_hangs(verifier: FakeVerifier, start: StartSpeculator) -> None:
    speculator = start(ScriptedSource(next_tokens))
    await (await verifier.next_stream()).welcome()
    await asyncio.wait_for(speculator.stop(), 5)


async def test_real_sources_send_valid_trees_over_a_long_life(verifier: FakeVerifier, start: StartSpeculator) -> None:
    start(NgramSource(), SuffixSource(), RecyclingSource(VOCAB))
    stream = await verifier.next_stream()
    await stream.welcome(credit=10_000, max_nodes=9, max_depth=4)
    rng = random.Random(7)
    tokens = {handle: [rng.randrange(6) for _ in range(12)] for handle in range(1, 6)}
    await stream.update(assignments=[assignment(handle, ids, budget=8) for handle, ids in tokens.items()])
    drafted_by = 0
    for _ in range(60):
        for handle, message in (await stream.proposals()).items():
            proposal = proposal_from_proto(message, vocab_size=VOCAB, max_nodes=9, max_depth=4, num_sources=3)
            assert proposal.rebased(tokens[handle]) == proposal.tree
            for mask in proposal.tree.source_masks or ():
                drafted_by |= mask
        commits = []
        for handle, ids in tokens.items():
            new = [rng.randrange(6) for _ in range(rng.randrange(1, 4))]
            top = [verifier_pb2.TopTokens(token_ids=rng.sample(range(6), 4)) for _ in new]
            commits.append(commit(handle, len(ids), new, budget=8, top_tokens=top))
            ids.extend(new)
        await stream.update(commits=commits)
    assert drafted_by == 0b111


def _write_target(folder: Path) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {chr(97 + i): i for i in range(26)} | {"</s>": 26}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 26, "content": "</s>", "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
        ],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "truncation": None, "padding": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": 26}))


async def test_the_process_serves_and_ends_on_sigterm(verifier: FakeVerifier, address: str, tmp_path: Path) -> None:
    _write_target(tmp_path / "model")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "treeserve_speculator",
        *("--model-folder", str(tmp_path / "model"), "--model-name", "letters"),
        *("--verifiers", address, "--listen", f"unix:{tmp_path}/health"),
    )
    try:
        stream = await verifier.next_stream(timeout_s=30)
        model = stream.hello.model
        assert (model.name, model.vocab_size, model.padded_vocab_size) == ("letters", 27, 32)
        assert list(model.eos_token_ids) == [26]
        await stream.welcome()
        await stream.update(assignments=[assignment(1, [1, 2, 3, 1, 2])])
        assert list((await stream.proposals())[1].token_ids)[:2] == [2, 3]
        process.send_signal(signal.SIGTERM)
        assert await stream.read() is None
        stream.end()
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
