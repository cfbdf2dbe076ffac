"""The Decode stream: routers submit sequences and read their tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import InvalidArgumentError, OverloadedError
from treeserve_core.grammar import Grammar
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity, check_protocol
from treeserve_engine.constraint import Constraint
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.intake import CompleteError, Intake
from treeserve_verifier.load import Load
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.sequence import Emission, Sequence, Submission
from treeserve_wire import codec
from treeserve_wire.credits import Credits
from treeserve_wire.server import ServicerContext, write_all
from treeserve_wire.status import to_status
from treeserve_wire.tasks import until_first_ends

_log = structlog.get_logger(__name__)

# Bounds a frame below 1 MiB: a token with 20 log-probabilities takes about 320 bytes.
_MAX_TOKENS_PER_FRAME = 2048
_MAX_SEQUENCES_PER_STREAM = 4096
_UNTOLD_SHARE_OF_BLOCKS = 64


class DecodeStream:
    """One router's stream: its sequences by handle, and what waits to be sent to it.

    Emissions gather here without bound on frames but with one on content, a sequence's max_tokens; they leave in one
    frame for all sequences as soon as the router's credit allows. First tokens and ends leave at once, others no sooner
    than `interval_s` after the frame before: each frame costs every process on its way as much as many tokens do.
    """

    def __init__(self, loop: VerifyLoop, intake: Intake, router_id: str, credit: int, interval_s: float) -> None:
        self._loop = loop
        self._intake = intake
        self.router_id = router_id
        self.credits = Credits(credit)
        self._sequences: dict[int, Sequence] = {}
        self._compiling: dict[int, asyncio.Task[None]] = {}  # what waits for its grammar, by handle
        self._pending: dict[int, list[Emission]] = {}
        self._load: verifier_pb2.LoadReport | None = None
        self._wake = asyncio.Event()
        self._interval_s = interval_s
        self._sent_at = -math.inf
        self._is_urgent = False
        self._alarm: asyncio.TimerHandle | None = None

    def submit(self, message: verifier_pb2.SubmitSequence) -> None:
        """Take a sequence, once its grammar is compiled, or answer its handle with the reason it is refused."""
        handle, first = message.handle, len(message.generated_token_ids)
        if handle in self._sequences or handle in self._compiling:
            raise InvalidArgumentError("handle", f"{handle} is in use on this stream")
        try:
            num_open = len(self._sequences) + len(self._compiling)
            if num_open >= _MAX_SEQUENCES_PER_STREAM:
                raise OverloadedError(f"{num_open} sequences are open on this stream", 1.0)
            submission = _submission(message)
            if submission.sampling.grammar is None:
                self._accept(handle, submission, None)
            else:
                self._intake.check(submission)
                compiling = self._compile(handle, submission, submission.sampling.grammar)
                self._compiling[handle] = asyncio.create_task(compiling)
        except Exception as error:
            self._refuse(handle, error, first)

    def cancel(self, handle: int) -> None:
        """Drop a sequence; an unknown handle has ended already."""
        sequence = self._sequences.pop(handle, None)
        self._pending.pop(handle, None)
        if (compiling := self._compiling.pop(handle, None)) is not None:
            compiling.cancel()
        if sequence is not None:
            self._loop.cancel(sequence)

    def close(self) -> None:
        """The router is gone: drop all its sequences."""
        for handle in [*self._sequences, *self._compiling]:
            self.cancel(handle)
        self._cancel_alarm()

    def grant(self, frames: int) -> None:
        """The router read some frames."""
        self.credits.grant(frames)
        self._wake.set()

    def report(self, load: verifier_pb2.LoadReport) -> None:
        """Send the load soon; a newer report replaces one that was not sent yet."""
        self._load = load
        self._wake.set()

    def flush(self) -> None:
        """Send what gathered, now or when it is due. Emissions alone do not: a step makes many, and the next one is
        more urgent.
        """
        if not self._pending:
            return
        event_loop = asyncio.get_running_loop()
        wait_s = 0.0 if self._is_urgent else self._sent_at + self._interval_s - event_loop.time()
        if wait_s <= 0:
            self._wake.set()
        elif self._alarm is None:
            self._alarm = event_loop.call_later(wait_s, self._wake.set)

    async def frames(self) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        """Frames to send, as they become due; endless."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._load is not None:
                load, self._load = self._load, None
                yield verifier_pb2.DecodeResponse(load=load)
            while self._pending and self.credits.try_take():
                self._cancel_alarm()
                self._sent_at, self._is_urgent = asyncio.get_running_loop().time(), False
                yield verifier_pb2.DecodeResponse(tokens=self._next_batch())

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _compile(self, handle: int, submission: Submission, grammar: Grammar) -> None:
        try:
            constraint = await self._intake.constraint(grammar)
            del self._compiling[handle]
            self._accept(handle, submission, constraint)
        except Exception as error:
            self._compiling.pop(handle, None)
            self._refuse(handle, error, len(submission.generated_token_ids))

    def _accept(self, handle: int, submission: Submission, constraint: Constraint | None) -> None:
        first = len(submission.generated_token_ids)
        try:
            sequence = self._intake.accept(submission, lambda emission: self._emit(handle, emission, first), constraint)
        except CompleteError as complete:
            self._emit(handle, Emission(first, (), finish_reason=complete.finish_reason), first)
            self.flush()
            return
        try:
            self._loop.submit(sequence)
        except Exception:
            sequence.span.end()
            raise
        self._sequences[handle] = sequence

    def _refuse(self, handle: int, error: Exception, first_offset: int) -> None:
        self._emit(handle, Emission(first_offset, (), error=error), first_offset)
        self.flush()

    def _emit(self, handle: int, emission: Emission, first_offset: int) -> None:
        is_end = emission.finish_reason is not None or emission.error is not None
        self._is_urgent = self._is_urgent or is_end or emission.offset == first_offset
        if is_end:
            self._sequences.pop(handle, None)
        self._pending.setdefault(handle, []).append(emission)

    def _next_batch(self) -> verifier_pb2.TokenBatch:
        batch = verifier_pb2.TokenBatch()
        room = _MAX_TOKENS_PER_FRAME
        for handle in list(self._pending):
            emissions = self._pending[handle]
            message = batch.sequences.add(handle=handle, offset=emissions[0].offset)
            taken = 0
            while taken < len(emissions) and (room > 0 or not emissions[taken].token_ids):
                _append(message, emissions[taken])
                room -= len(emissions[taken].token_ids)
                taken += 1
            del emissions[:taken]
            if not emissions:
                del self._pending[handle]
            if room <= 0:
                break
        return batch


class DecodeHandler:
    """Serves Decode streams."""

    def __init__(
        self, config: VerifierConfig, identity: ModelIdentity, loop: VerifyLoop, intake: Intake, total_blocks: int
    ) -> None:
        self._config = config
        self._identity = identity
        self._loop = loop
        self._intake = intake
        self._total_blocks = total_blocks
        self._streams: set[DecodeStream] = set()
        self._last_load: Load | None = None

    async def serve(self, requests: AsyncIterator[verifier_pb2.DecodeRequest], context: ServicerContext) -> None:
        """One stream, from hello to end.

        Raises:
            HandshakeError: the router speaks another protocol version.
            InvalidArgumentError: the framing is broken.
        """
        hello = await anext(aiter(requests), None)
        if hello is None:
            return
        if hello.WhichOneof("frame") != "hello":
            raise InvalidArgumentError("frame", "a Decode stream begins with a hello")
        check_protocol(hello.hello.protocol_version)
        stream = DecodeStream(
            self._loop,
            self._intake,
            hello.hello.router_id,
            hello.hello.initial_credit,
            self._config.emit_interval_ms / 1e3,
        )
        await context.write(self._welcome())
        self._streams.add(stream)
        self._report(self._loop.load())
        _log.info("router connected", router=stream.router_id)
        try:
            await until_first_ends(self._read(stream, requests), write_all(context, stream.frames()))
        finally:
            self._streams.discard(stream)
            stream.close()
            _log.info("router disconnected", router=stream.router_id)

    async def _read(self, stream: DecodeStream, requests: AsyncIterator[verifier_pb2.DecodeRequest]) -> None:
        async for request in requests:
            self._take(stream, request)

    def update(self) -> None:
        """Send all routers their tokens, and what this verifier can still take if that changed."""
        load = self._loop.load()
        if self._differs(load):
            self._report(load)
        for stream in self._streams:
            stream.flush()

    def _differs(self, load: Load) -> bool:
        """Whether routers must know: a few KV blocks come and go with every step, and every step takes its own time."""
        told = self._last_load
        return told is None or not told.resembles(load, few_blocks=self._total_blocks // _UNTOLD_SHARE_OF_BLOCKS)

    def _report(self, load: Load) -> None:
        """Tell all of them: each must know what was told last."""
        self._last_load = load
        report = verifier_pb2.LoadReport(
            sequences=load.sequences,
            free_blocks=load.free_blocks,
            total_blocks=self._total_blocks,
            draining=load.draining,
            speculators=load.speculators,
            waiting=load.waiting,
            preemptible=load.preemptible,
            step_ms=load.step_ms,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            work_s=load.work_s,
            drafting_s=load.drafting_s,
        )
        for stream in self._streams:
            stream.report(report)

    def _take(self, stream: DecodeStream, request: verifier_pb2.DecodeRequest) -> None:
        kind = request.WhichOneof("frame")
        if kind == "submit":
            for message in request.submit.sequences:
                stream.submit(message)
        elif kind == "cancel":
            for handle in request.cancel.handles:
                stream.cancel(handle)
            self._report(self._loop.load())  # a sign of life, whatever changed
        elif kind == "credit":
            stream.grant(request.credit.frames)
        else:
            raise InvalidArgumentError("frame", f"{kind or 'an empty frame'} is not expected here")

    def _welcome(self) -> verifier_pb2.DecodeResponse:
        return verifier_pb2.DecodeResponse(
            welcome=verifier_pb2.DecodeWelcome(
                protocol_version=PROTOCOL_VERSION,
                verifier_id=self._config.verifier_id,
                model=codec.identity_to_proto(self._identity),
                max_context_tokens=self._config.max_context_tokens,
                max_sequences=self._config.places,
                dtype=self._config.dtype,
                acceptance_rules=[codec.acceptance_rule_to_proto(rule) for rule in AcceptanceRule],
                block_size=self._config.block_size,
                grammars=True,
            )
        )


def _submission(message: verifier_pb2.SubmitSequence) -> Submission:
    limits = codec.limits_from_proto(message.speculation, message.service_level)
    return Submission(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        generated_token_ids=tuple(message.generated_token_ids),
        sampling=codec.sampling_from_proto(message.sampling),
        stopping=codec.stopping_from_proto(message.stopping, max_tokens_default=0),
        limits=replace(limits, preemptible=message.preemptible),
        traceparent=message.traceparent,
        tenant=message.tenant,
        session_id=message.session_id,
        session_epoch=message.session_epoch,
        waited_ms=message.waited_ms,
    )


def _append(message: verifier_pb2.SequenceTokens, emission: Emission) -> None:
    message.token_ids.extend(emission.token_ids)
    message.log_probs.extend(codec.log_probs_to_proto(emission.log_probs))
    if emission.error is not None:
        message.end.status.CopyFrom(to_status(emission.error))
    elif emission.finish_reason is not None:
        message.end.reason = codec.finish_reason_to_proto(emission.finish_reason)
        message.end.stop_string = emission.stop_string
        message.end.cached_tokens = emission.cached_tokens
    if message.HasField("end") and emission.stats is not None:
        message.end.speculation.CopyFrom(codec.stats_to_proto(emission.stats))
