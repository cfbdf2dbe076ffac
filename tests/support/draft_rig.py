"""A speculator's draft client in this process, and a verifier whose streams the test drives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity
from treeserve_core.tree import TokenTree
from treeserve_speculator.conversation import DraftPeer
from treeserve_speculator.draft_client import DraftClient, draft_hello
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.session import DraftSession
from treeserve_speculator.sources.base import DraftSource
from treeserve_wire.backoff import Backoff
from treeserve_wire.server import ServiceServer
from treeserve_wire.status import abort

VOCAB = 100
EOS = 99
IDENTITY = ModelIdentity("tiny", "hash", VOCAB, 104, (EOS,))
TIMEOUT_S = 10.0
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
        """Answer the hello."""
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
        """Send a frame."""
        await self._context.write(verifier_pb2.DraftResponse(**frame))

    async def update(self, **update: Any) -> None:
        """Send an update."""
        await self.send(update=verifier_pb2.DraftUpdate(**update))

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
        """End the call, with this error if any."""
        self.refusal = refusal
        self.ended.set()


class DraftVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Hands every Draft call to the test."""

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
        """End every call that was opened."""
        for stream in self._opened:
            stream.end()

    async def next_stream(self, timeout_s: float = TIMEOUT_S) -> Stream:
        """The next call that opens."""
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
        """A metric's value."""
        return self.registry.get_sample_value(f"treeserve_speculator_{name}", labels) or 0.0

    async def stop(self) -> None:
        """End the client and its thread."""
        self.client.stop()
        await asyncio.wait_for(self.task, TIMEOUT_S)
        self.executor.shutdown()


async def serve(verifier: DraftVerifier, address: str) -> ServiceServer:
    """Start a server of it."""
    server = ServiceServer(address, "treeserve.verifier.v1.VerifierService")
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server.grpc)
    await server.start()
    return server


StartSpeculator = Callable[..., Speculator]


def assignment(handle: int, token_ids: Sequence[int], budget: int = 3) -> verifier_pb2.Assignment:
    return verifier_pb2.Assignment(handle=handle, token_ids=token_ids, budget=budget, prompt_tokens=1)


def commit(handle: int, base: int, token_ids: Sequence[int], budget: int = 3, **more: Any) -> verifier_pb2.Commit:
    return verifier_pb2.Commit(handle=handle, base_committed_len=base, token_ids=token_ids, budget=budget, **more)
