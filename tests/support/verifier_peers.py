"""A verifier in this process on a Unix socket, and peers that speak to it as routers and speculators do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from opentelemetry import trace
from prometheus_client import CollectorRegistry

from support.waiting import until as until
from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_core.identity import PROTOCOL_VERSION
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.main import Engine, Verifier, load_engine
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_wire import codec, draft_codec
from treeserve_wire.channel import open_channel
from treeserve_wire.tls import Tls

TIMEOUT_S = 30.0
DraftFunction = Callable[[list[int], int, int], TokenTree | None]


@dataclass
class RunningVerifier:
    """A verifier and how to reach it."""

    verifier: Verifier
    engine: Engine
    address: str
    registry: CollectorRegistry

    def metric(self, name: str) -> float:
        """The value of one of its metrics."""
        value = self.registry.get_sample_value(name)
        assert value is not None, name
        return value

    @property
    def identity(self) -> common_pb2.ModelIdentity:
        """Its model's identity."""
        return codec.identity_to_proto(self.engine.identity)

    def check_all_blocks_free(self) -> None:
        """Nothing leaked and nothing is broken."""
        blocks = self.verifier.blocks
        blocks.check_integrity()
        assert blocks.free_blocks == blocks.total_blocks


@asynccontextmanager
async def running_verifier(model: Path, socket_dir: Path, **changes: Any) -> AsyncIterator[RunningVerifier]:
    """Serve `model` until the block ends."""
    defaults: dict[str, Any] = {
        "model_folder": model,
        "model_name": "tiny",
        "listen": f"unix:{socket_dir}/verifier.sock",
        "kv_tokens": 2048,
        "max_context_tokens": 256,
        "dtype": "float32",
        "threads": 1,
        "drain_s": 5.0,
        "draft_wait_ms": 200.0,
        "draft_always": True,
    }
    config = VerifierConfig(**{**defaults, **changes})
    engine = load_engine(config)
    registry = CollectorRegistry()
    verifier = Verifier(config, engine, trace.get_tracer("test"), VerifierMetrics(registry), Tls.of(config.tls))
    stop = asyncio.Event()
    serving = asyncio.create_task(verifier.serve(stop))
    try:
        yield RunningVerifier(verifier, engine, config.listen, registry)
    finally:
        stop.set()
        await asyncio.wait_for(serving, TIMEOUT_S)


@dataclass
class Output:
    """What arrived for one handle. Offsets are checked on arrival."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[common_pb2.PositionLogProbs] = field(default_factory=list)
    end: verifier_pb2.SequenceEnd | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    first_offset: int | None = None

    def take(self, message: verifier_pb2.SequenceTokens) -> None:
        """Add a message: no gap, no repeat, nothing after the end."""
        assert self.end is None, "tokens after the end"
        if self.first_offset is None:
            self.first_offset = message.offset
        assert message.offset == self.first_offset + len(self.token_ids)
        self.token_ids.extend(message.token_ids)
        self.log_probs.extend(message.log_probs)
        if message.HasField("end"):
            self.end = message.end
            self.finished.set()


class _Peer:
    """One stream to a verifier. Frames are written one after the other, from whatever task."""

    def __init__(self, address: str, frame: type[Message]) -> None:
        self._channel = open_channel(address)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        self._frame = frame
        self._writing = asyncio.Lock()

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self.call.cancel()
        await self._channel.close()

    async def send(self, **frame: Any) -> None:
        """Write one frame."""
        async with self._writing:
            await self.call.write(self._frame(**frame))


class RouterPeer(_Peer):
    """Speaks Decode as a router does."""

    def __init__(self, address: str, credit: int = 1000) -> None:
        super().__init__(address, verifier_pb2.DecodeRequest)
        self._credit = credit
        self.outputs: dict[int, Output] = {}
        self.welcome: verifier_pb2.DecodeWelcome | None = None
        self.loads: list[verifier_pb2.LoadReport] = []
        self.token_frames = 0

    async def __aenter__(self) -> RouterPeer:
        self.call = self._stub.Decode()
        hello = verifier_pb2.DecodeHello(
            protocol_version=PROTOCOL_VERSION, router_id="test", initial_credit=self._credit
        )
        await self.send(hello=hello)
        first = await self.call.read()
        self.welcome = first.welcome
        self._reader = asyncio.create_task(self._read())
        return self

    async def submit(self, handle: int, prompt: Sequence[int], **options: Any) -> Output:
        """Submit a sequence; see `submission` for the options."""
        self.outputs[handle] = Output()
        await self.send(submit=verifier_pb2.Submit(sequences=[submission(handle, prompt, **options)]))
        return self.outputs[handle]

    async def generate(self, handle: int, prompt: Sequence[int], **options: Any) -> Output:
        """Submit a sequence and wait for its end."""
        output = await self.submit(handle, prompt, **options)
        await asyncio.wait_for(output.finished.wait(), TIMEOUT_S)
        return output

    async def _read(self) -> None:
        while (frame := await self.call.read()) is not grpc.aio.EOF:
            if frame.HasField("load"):
                self.loads.append(frame.load)
                continue
            self.token_frames += 1
            for message in frame.tokens.sequences:
                self.outputs[message.handle].take(message)


def submission(
    handle: int,
    prompt: Sequence[int],
    *,
    generated: Sequence[int] = (),
    max_tokens: int = 24,
    speculate: bool = True,
    stopping: dict[str, Any] | None = None,
    tenant: str = "",
    level: dict[str, Any] | None = None,
    submit: dict[str, Any] | None = None,
    **sampling: Any,
) -> verifier_pb2.SubmitSequence:
    """A SubmitSequence; `sampling` are fields of SamplingParameters, `level` of ServiceLevel, `submit` further ones."""
    return verifier_pb2.SubmitSequence(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        sampling=common_pb2.SamplingParameters(**sampling),
        stopping=common_pb2.StoppingCriteria(max_tokens=max_tokens, **(stopping or {})),
        speculation=common_pb2.SpeculationOptions(disabled=not speculate),
        tenant=tenant,
        service_level=common_pb2.ServiceLevel(**(level or {})),
        **(submit or {}),
    )


class SpeculatorPeer(_Peer):
    """Speaks Draft as a speculator does, with a function (tokens, budget, seed) -> tree in place of draft sources."""

    def __init__(self, running: RunningVerifier, draft: DraftFunction, **hello: Any) -> None:
        super().__init__(running.address, verifier_pb2.DraftRequest)
        self._draft = draft
        self._hello = {
            "protocol_version": PROTOCOL_VERSION,
            "speculator_id": "test",
            "model": running.identity,
            "sources": ["test"],
            "initial_credit": 1000,
            **hello,
        }
        self.tokens: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.released: set[int] = set()
        self.rejections: asyncio.Queue[verifier_pb2.Rejection] = asyncio.Queue()
        self.assigned = asyncio.Event()
        self.commits: list[verifier_pb2.Commit] = []
        self.assignments: list[verifier_pb2.Assignment] = []
        self.prices: list[verifier_pb2.DraftPrices] = []

    async def __aenter__(self) -> SpeculatorPeer:
        self.call = self._stub.Draft()
        await self.send(hello=verifier_pb2.DraftHello(**self._hello))
        self.welcome = (await self.call.read()).welcome
        self._reader = asyncio.create_task(self._read())
        return self

    async def propose(self, *proposals: verifier_pb2.TreeProposal) -> None:
        """Send trees as they are, malformed ones too."""
        await self.send(proposals=verifier_pb2.Proposals(proposals=proposals))

    async def _read(self) -> None:
        while (frame := await self.call.read()) is not grpc.aio.EOF:
            if frame.HasField("rejections"):
                for rejection in frame.rejections.rejections:
                    self.rejections.put_nowait(rejection)
            elif frame.HasField("update"):
                await self._take(frame.update)

    async def _take(self, update: verifier_pb2.DraftUpdate) -> None:
        due: dict[int, int] = {}
        self.prices.append(update.prices)
        for assignment in update.assignments:
            self.assignments.append(assignment)
            self.tokens[assignment.handle] = list(assignment.token_ids)
            self.seeds[assignment.handle] = assignment.sampling.seed
            due[assignment.handle] = assignment.budget
            self.assigned.set()
        for commit in update.commits:
            self.commits.append(commit)
            tokens = self.tokens[commit.handle]
            assert commit.base_committed_len == len(tokens), "commits have no gap and no repeat"
            tokens.extend(commit.token_ids)
            due[commit.handle] = commit.budget
        self.released.update(update.released)
        proposals = []
        for handle, budget in due.items():
            if handle in self.released or budget == 0:
                continue
            tree = self._draft(self.tokens[handle], budget, self.seeds[handle])
            if tree is not None:
                tree = tree.pruned(budget, self.welcome.max_depth)
                proposals.append(tree_message(handle, len(self.tokens[handle]), tree))
        if proposals:
            await self.propose(*proposals)


def tree_message(handle: int, base: int, tree: TokenTree) -> verifier_pb2.TreeProposal:
    """A proposal on the wire."""
    return draft_codec.proposal_to_proto(handle, DraftProposal(base, tree))
