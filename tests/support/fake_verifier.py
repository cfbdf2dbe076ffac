"""A verifier without a model: speaks the Decode protocol and commits what a script says."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc.status_pb2 import Status

from support.waiting import until
from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve.verifier.v1.verifier_pb2_grpc import VerifierServiceServicer, add_VerifierServiceServicer_to_server
from treeserve_core.errors import TreeserveError
from treeserve_text.assembler import TextAssembler
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.credits import Credits
from treeserve_wire.status import to_status

MODEL_NAME = "tiny"
Script = Callable[[pb.SubmitSequence, list[int]], int]


def pseudo_random(low: int, high: int) -> Script:
    """The next token is a function of the seed and all tokens so far, and nothing else: what replay relies on."""

    def next_token(message: pb.SubmitSequence, output: list[int]) -> int:
        state = f"{message.sampling.seed} {list(message.prompt_token_ids)} {output}"
        return low + int.from_bytes(hashlib.sha256(state.encode()).digest()[:4], "big") % (high - low)

    return next_token


def recite(token_ids: Sequence[int]) -> Script:
    """The output is this, over and over."""
    return lambda message, output: token_ids[len(output) % len(token_ids)]


class FakeVerifier(VerifierServiceServicer):
    """What a test may set and see.

    Attributes:
        script: chooses tokens.
        tokens_per_frame: tokens a step emits.
        hold_at: output length at which sequences stop until it is raised; None never stops them.
        refuse: answers every submission with this error.
        deaf: sequences go on when they are cancelled.
        answers: with a load report to each cancel, as a live verifier does.
        cached_tokens: tokens of every prompt that it says it still held.
        submits, cancelled, credit: what the router sent.
        frames: token frames sent.
    """

    def __init__(self, tokenizer: Tokenizer, address: str, script: Script, **welcome: Any) -> None:
        self.tokenizer = tokenizer
        self.address = address
        self.script = script
        self.tokens_per_frame = 1
        self.hold_at: int | None = None
        self.refuse: TreeserveError | None = None
        self.deaf = False
        self.answers = False
        self.cached_tokens = 0
        self.submits: list[pb.SubmitSequence] = []
        self.cancelled: list[int] = []
        self.credit = 0
        self.hello: pb.DecodeHello | None = None
        self.frames = 0
        self.connections = 0
        self.welcome = pb.DecodeWelcome(
            protocol_version=1,
            verifier_id=address.rpartition("/")[2],
            model=common_pb2.ModelIdentity(
                name=MODEL_NAME,
                tokenizer_hash=tokenizer.hash,
                vocab_size=tokenizer.vocab_size,
                padded_vocab_size=tokenizer.vocab_size + 10,
                eos_token_ids=tokenizer.eos_token_ids,
            ),
            max_context_tokens=256,
            max_sequences=4,
            dtype="float32",
        )
        self.welcome.acceptance_rules.extend(welcome.pop("acceptance_rules", ()))
        for name, value in welcome.items():
            setattr(self.welcome, name, value)
        self.streams: list[_Stream] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = grpc.aio.server()
        add_VerifierServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        """Die at once; `start` brings it back."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def report(self, **load: Any) -> None:
        """Send a load report to every router."""
        for stream in self.streams:
            await stream.send(pb.DecodeResponse(load=pb.LoadReport(**load)))

    async def Decode(self, requests: Any, context: Any) -> None:
        """Serve a router."""
        first = await anext(aiter(requests))
        self.hello = first.hello
        self.connections += 1
        stream = _Stream(self, context, Credits(first.hello.initial_credit))
        await stream.send(pb.DecodeResponse(welcome=self.welcome))
        self.streams.append(stream)
        try:
            async for request in requests:
                stream.take(request)
        finally:
            self.streams.remove(stream)
            stream.close()


class _Stream:
    def __init__(self, verifier: FakeVerifier, context: Any, credits: Credits) -> None:
        self._verifier = verifier
        self._context = context
        self._credits = credits
        self._granted = asyncio.Event()
        self._lock = asyncio.Lock()
        self._sequences: dict[int, asyncio.Task[None]] = {}

    def take(self, request: pb.DecodeRequest) -> None:
        for message in request.submit.sequences:
            self._verifier.submits.append(message)
            self._sequences[message.handle] = asyncio.create_task(self._generate(message))
        for handle in request.cancel.handles:
            self._verifier.cancelled.append(handle)
            if not self._verifier.deaf:
                self._sequences[handle].cancel()
        if request.HasField("cancel") and self._verifier.answers:
            self._answer = asyncio.create_task(self.send(pb.DecodeResponse(load=pb.LoadReport())))
        if request.credit.frames:
            self._verifier.credit += request.credit.frames
            self._credits.grant(request.credit.frames)
            self._granted.set()

    def close(self) -> None:
        for task in self._sequences.values():
            task.cancel()

    async def send(self, frame: pb.DecodeResponse) -> None:
        async with self._lock:
            await self._context.write(frame)

    async def send_tokens(self, entry: pb.SequenceTokens) -> None:
        while not self._credits.try_take():
            self._granted.clear()
            await self._granted.wait()
        self._verifier.frames += 1
        await self.send(pb.DecodeResponse(tokens=pb.TokenBatch(sequences=[entry])))

    async def _generate(self, message: pb.SubmitSequence) -> None:
        verifier = self._verifier
        if verifier.refuse is not None:
            await self.send_tokens(_failed(message.handle, to_status(verifier.refuse)))
            return
        output = list(message.generated_token_ids)
        watch = TextAssembler(verifier.tokenizer, tuple(message.stopping.stop_strings))
        watch.push(output)
        end: pb.SequenceEnd | None = None
        while end is None:
            await until(lambda: verifier.hold_at is None or len(output) < verifier.hold_at, timeout_s=60)
            entry = pb.SequenceTokens(handle=message.handle, offset=len(output))
            while end is None and len(entry.token_ids) < verifier.tokens_per_frame:
                token_id = verifier.script(message, output)
                output.append(token_id)
                watch.push([token_id])
                entry.token_ids.append(token_id)
                if message.sampling.HasField("top_log_probs"):
                    entry.log_probs.add(chosen=common_pb2.TokenLogProb(token_id=token_id, log_prob=-len(output)))
                end = self._end(message, output, watch.stopped)
            if end is not None:
                entry.end.CopyFrom(end)
                entry.end.cached_tokens = verifier.cached_tokens
            await self.send_tokens(entry)

    def _end(self, message: pb.SubmitSequence, output: list[int], stopped: str | None) -> pb.SequenceEnd | None:
        steps = len(output) - len(message.generated_token_ids)
        stats = common_pb2.SpeculationStats(steps=steps, drafted=2 * steps, accepted=1, accepted_per_depth=[1])
        if stopped is not None:
            return pb.SequenceEnd(reason=common_pb2.FINISH_REASON_STOP, stop_string=stopped, speculation=stats)
        stops = set(message.stopping.stop_token_ids)
        if not message.stopping.ignore_eos:
            stops |= set(self._verifier.tokenizer.eos_token_ids)
        if output[-1] in stops:
            return pb.SequenceEnd(reason=common_pb2.FINISH_REASON_STOP, speculation=stats)
        if len(output) >= message.stopping.max_tokens:
            return pb.SequenceEnd(reason=common_pb2.FINISH_REASON_LENGTH, speculation=stats)
        return None


def _failed(handle: int, status: Status) -> pb.SequenceTokens:
    return pb.SequenceTokens(handle=handle, end=pb.SequenceEnd(status=status))


@asynccontextmanager
async def fake_verifiers(*verifiers: FakeVerifier) -> AsyncIterator[None]:
    """Run these until the block ends."""
    for verifier in verifiers:
        await verifier.start()
    try:
        yield
    finally:
        for verifier in verifiers:
            await verifier.kill()
