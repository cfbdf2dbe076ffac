"""A Decode stream after its handshake: submits sequences and delivers what comes back, as long as the call lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import InvalidArgumentError, OverloadedError, UnavailableError
from treeserve_core.identity import ModelIdentity
from treeserve_router.mailbox import Ended, Lost, Placed, Tokens
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket
from treeserve_wire import codec
from treeserve_wire.channel import MAX_MESSAGE_BYTES
from treeserve_wire.credits import CreditWindow
from treeserve_wire.status import from_status
from treeserve_wire.tasks import until_first_ends

# How long a verifier that refused or handed back a sequence is left alone: its next load report may tell more, and
# tries in quick succession would only use up the request's replays.
_MAX_HOLD_OFF_S = 1.0
_HANDED_BACK_HOLD_OFF_S = 0.1
# Submissions share a frame up to this size; a frame must stay below the message limit.
_SUBMIT_FRAME_BYTES = MAX_MESSAGE_BYTES // 2
_MAX_SUBMIT_BYTES = MAX_MESSAGE_BYTES - 1024

DecodeCall = grpc.aio.StreamStreamCall[pb.DecodeRequest, pb.DecodeResponse]


@dataclass(frozen=True)
class VerifierOffer:
    """What a verifier said of itself in its welcome.

    Attributes:
        max_context_tokens: longest prompt plus output.
        max_sequences: sequences it runs at once.
        dtype: element type of the weights.
        acceptance_rules: those it knows.
    """

    verifier_id: str
    model: ModelIdentity
    max_context_tokens: int
    max_sequences: int
    dtype: str
    acceptance_rules: frozenset[AcceptanceRule]


class DecodeStream:
    """The sequences on one stream, by handle, and the frames that wait to be written.

    Args:
        offer: what the verifier's welcome said.
        token_credit: token frames the verifier may have in flight.
        on_change: called after anything that placement may care about: load, room.
    """

    def __init__(
        self, address: str, call: DecodeCall, offer: VerifierOffer, token_credit: int, on_change: Callable[[], None]
    ) -> None:
        self.offer = offer
        self._address = address
        self._call = call
        self._on_change = on_change
        self._window = CreditWindow(token_credit)
        self._load = pb.LoadReport()
        self._tickets: dict[int, Ticket] = {}
        self._handles: dict[Ticket, int] = {}
        self._unreported: set[int] = set()
        self._last_handle = 0
        self._held_off = False
        # What waits to be written: each kind gathers, so a busy moment costs one frame of each.
        self._submits: dict[int, pb.SubmitSequence] = {}
        self._cancels: list[int] = []
        self._credit = 0
        self._to_write = asyncio.Event()

    @property
    def state(self) -> VerifierState:
        """What placement may know. A report may be older than the last submissions, so those count on top."""
        return VerifierState(
            address=self._address,
            verifier_id=self.offer.verifier_id,
            max_context_tokens=self.offer.max_context_tokens,
            max_sequences=self.offer.max_sequences,
            sequences=max(self._load.sequences + len(self._unreported), len(self._tickets)),
            free_blocks=self._load.free_blocks,
            total_blocks=self._load.total_blocks,
            draining=self._load.draining,
            speculators=self._load.speculators,
            holding_off=self._held_off,
            acceptance_rules=self.offer.acceptance_rules,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs on this stream."""
        return not self._tickets

    def submit(self, ticket: Ticket) -> None:
        """Give a sequence to the verifier."""
        handle = self._new_handle()
        message = _submit_message(handle, ticket)
        if message.ByteSize() > _MAX_SUBMIT_BYTES:
            error = InvalidArgumentError("prompt", f"{ticket.num_tokens} tokens do not fit one message to a verifier")
            ticket.mailbox.put(Ended(None, error=error))
            return
        self._tickets[handle] = ticket
        self._handles[ticket] = handle
        self._unreported.add(handle)
        self._submits[handle] = message
        self._to_write.set()
        ticket.mailbox.put(Placed(self.offer.verifier_id))

    def cancel(self, ticket: Ticket) -> None:
        """Drop a sequence, if it still runs here."""
        handle = self._handles.get(ticket)
        if handle is None:
            return
        self._forget(handle)
        if self._submits.pop(handle, None) is None:
            self._cancels.append(handle)
            self._to_write.set()
        self._on_change()

    def lose_all(self, why: str) -> None:
        """Tell the owners of all sequences that nothing more will come."""
        for handle, ticket in list(self._tickets.items()):
            self._forget(handle)
            ticket.mailbox.put(Lost(self.offer.verifier_id, why))

    async def run(self) -> None:
        """Read and write until the stream ends.

        Raises:
            grpc.RpcError: when the call fails.
            UnavailableError: when the verifier closes the stream.
        """
        await until_first_ends(self._read(), self._write())

    async def _read(self) -> None:
        while True:
            frame = await read_frame(self._call)
            match frame.WhichOneof("frame"):
                case "tokens":
                    for entry in frame.tokens.sequences:
                        self._deliver(entry)
                    self._grant(self._window.consume())
                case "load":
                    self._load = frame.load
                    self._unreported.clear()
                    self._on_change()
                case kind:
                    raise UnavailableError(f"the verifier sent an unexpected frame ({kind})")

    async def _write(self) -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            while (frame := self._next_frame()) is not None:
                try:
                    await self._call.write(frame)
                except asyncio.InvalidStateError:  # the call has ended: the reader learns why
                    return

    def _next_frame(self) -> pb.DecodeRequest | None:
        if self._credit:
            frames, self._credit = self._credit, 0
            return pb.DecodeRequest(credit=pb.Credit(frames=frames))
        if self._cancels:
            handles, self._cancels = self._cancels, []
            return pb.DecodeRequest(cancel=pb.Cancel(handles=handles))
        if self._submits:
            return pb.DecodeRequest(submit=pb.Submit(sequences=self._take_submits()))
        return None

    def _take_submits(self) -> list[pb.SubmitSequence]:
        taken: list[pb.SubmitSequence] = []
        size = 0
        while self._submits:
            handle, message = next(iter(self._submits.items()))
            size += message.ByteSize()
            if taken and size > _SUBMIT_FRAME_BYTES:
                break
            taken.append(self._submits.pop(handle))
        return taken

    def _deliver(self, entry: pb.SequenceTokens) -> None:
        ticket = self._tickets.get(entry.handle)
        if ticket is None:  # cancelled; these tokens were on their way
            return
        if entry.token_ids:
            log_probs = codec.log_probs_from_proto(entry.log_probs)
            ticket.mailbox.put(Tokens(entry.offset, tuple(entry.token_ids), log_probs))
        if entry.HasField("end"):
            self._forget(entry.handle)
            ended = _ended(entry.end)
            if isinstance(ended.error, OverloadedError):
                self._hold_off(min(ended.error.retry_after_s, _MAX_HOLD_OFF_S))
            elif isinstance(ended.error, UnavailableError):
                self._hold_off(_HANDED_BACK_HOLD_OFF_S)
            ticket.mailbox.put(ended)
            self._on_change()

    def _forget(self, handle: int) -> None:
        del self._handles[self._tickets.pop(handle)]
        self._unreported.discard(handle)

    def _grant(self, frames: int) -> None:
        if frames:
            self._credit += frames
            self._to_write.set()

    def _hold_off(self, seconds: float) -> None:
        def resume() -> None:
            self._held_off = False
            self._on_change()

        if not self._held_off:
            self._held_off = True
            asyncio.get_running_loop().call_later(seconds, resume)

    def _new_handle(self) -> int:
        while True:
            self._last_handle = (self._last_handle + 1) % 2**32
            if self._last_handle not in self._tickets:
                return self._last_handle


async def read_frame(call: DecodeCall) -> pb.DecodeResponse:
    """The next frame. Raises UnavailableError if the verifier closed the stream, grpc.RpcError if the call failed."""
    frame = await call.read()
    if not isinstance(frame, pb.DecodeResponse):
        raise UnavailableError("the verifier closed the stream")
    return frame


def _submit_message(handle: int, ticket: Ticket) -> pb.SubmitSequence:
    request = ticket.request
    speculation, service_level = codec.limits_to_proto(request.limits)
    return pb.SubmitSequence(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        generated_token_ids=ticket.generated_token_ids,
        sampling=codec.sampling_to_proto(request.sampling),
        stopping=codec.stopping_to_proto(request.stopping),
        speculation=speculation,
        service_level=service_level,
        traceparent=ticket.traceparent,
        tenant=request.tenant,
    )


def _ended(end: pb.SequenceEnd) -> Ended:
    try:
        stats = codec.stats_from_proto(end.speculation) if end.HasField("speculation") else None
        reason = codec.finish_reason_from_proto(end.reason)
    except InvalidArgumentError:
        stats, reason = None, None
    if end.HasField("status"):
        return Ended(None, stats=stats, error=from_status(end.status))
    if reason is None:  # not a reason this side knows: as good as a verifier that died
        return Ended(None, stats=stats, error=UnavailableError("the verifier ended the sequence without a reason"))
    return Ended(reason, stats)
