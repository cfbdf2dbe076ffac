"""A Decode stream after its handshake: submits sequences and delivers what comes back, as long as the call lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve_core.errors import InvalidArgumentError, OverloadedError, UnavailableError
from treeserve_router.ledger import Load, VerifierLedger, VerifierOffer
from treeserve_router.mailbox import Draining, Ended, Lost, Placed, Tokens
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket
from treeserve_router.request_codec import request_to_proto
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

# No step takes as many milliseconds, and no verifier computes as many tokens a second.
_MAX_FIGURE = 1e9

DecodeCall = grpc.aio.StreamStreamCall[pb.DecodeRequest, pb.DecodeResponse]


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
        self._call = call
        self._on_change = on_change
        self._window = CreditWindow(token_credit)
        self._ledger = VerifierLedger(address, offer, asyncio.get_running_loop().time)
        self._tickets: dict[int, Ticket] = {}
        self._handles: dict[Ticket, int] = {}
        self._last_handle = 0
        self._held_off = False
        self._suspected = False
        self._asks = False
        # What waits to be written: each kind gathers, so a busy moment costs one frame of each.
        self._submits: dict[int, pb.SubmitSequence] = {}
        self._cancels: list[int] = []
        self._credit = 0
        self._to_write = asyncio.Event()

    @property
    def state(self) -> VerifierState:
        """What placement may know."""
        return self._ledger.state

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs on this stream."""
        return not self._tickets

    def submit(self, ticket: Ticket, waited_s: float) -> None:
        """Give a sequence to the verifier. `waited_s`: how long its request has waited already."""
        handle = self._new_handle()
        message = _submit_message(handle, ticket, waited_s)
        if message.ByteSize() > _MAX_SUBMIT_BYTES:
            error = InvalidArgumentError("prompt", f"{ticket.num_tokens} tokens do not fit one message to a verifier")
            ticket.mailbox.put(Ended(None, error=error))
            return
        self._tickets[handle] = ticket
        self._handles[ticket] = handle
        self._ledger.sent(ticket, waited_s)
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

    def suspect(self) -> bool:
        """Ask it for a sign of life, and have placement avoid it until one comes; whether it was asked before."""
        if self._suspected:
            return True
        self._suspected = self._asks = True
        self._to_write.set()
        self._avoid()
        return False

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
            if self._suspected:
                self._suspected = False
                self._avoid()
            match frame.WhichOneof("frame"):
                case "tokens":
                    for entry in frame.tokens.sequences:
                        self._deliver(entry)
                    self._grant(self._window.consume())
                case "load":
                    if frame.load.draining and not self._ledger.state.draining:
                        for ticket in self._tickets.values():
                            ticket.mailbox.put(Draining())
                    self._ledger.reported(load_from_proto(frame.load))
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
                    await asyncio.get_running_loop().create_future()

    def _next_frame(self) -> pb.DecodeRequest | None:
        if self._credit:
            frames, self._credit = self._credit, 0
            return pb.DecodeRequest(credit=pb.Credit(frames=frames))
        if self._cancels or self._asks:  # it answers every cancel, an empty one too
            handles, self._cancels, self._asks = self._cancels, [], False
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
            if self._ledger.tokens(ticket, len(entry.token_ids)):
                self._on_change()  # one less to start: there may be room for the next
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
        ticket = self._tickets.pop(handle)
        del self._handles[ticket]
        self._ledger.gone(ticket)

    def _grant(self, frames: int) -> None:
        if frames:
            self._credit += frames
            self._to_write.set()

    def _hold_off(self, seconds: float) -> None:
        def resume() -> None:
            self._held_off = False
            self._avoid()

        if not self._held_off:
            self._held_off = True
            self._ledger.avoid(True)
            asyncio.get_running_loop().call_later(seconds, resume)

    def _avoid(self) -> None:
        self._ledger.avoid(self._held_off or self._suspected)
        self._on_change()

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


def _submit_message(handle: int, ticket: Ticket, waited_s: float) -> pb.SubmitSequence:
    message = request_to_proto(ticket.request)
    message.handle = handle
    message.generated_token_ids.extend(ticket.generated_token_ids)
    message.traceparent = ticket.traceparent
    message.session_epoch = ticket.session_epoch
    message.waited_ms = waited_s * 1000
    return message


def load_from_proto(report: pb.LoadReport) -> Load:
    """What a report says."""
    return Load(
        sequences=report.sequences,
        free_blocks=report.free_blocks,
        total_blocks=report.total_blocks,
        draining=report.draining,
        speculators=report.speculators,
        waiting=report.waiting,
        preemptible=report.preemptible,
        step_s=_measured(report.step_ms) / 1000,
        prefill_tokens_per_s=_measured(report.prefill_tokens_per_s),
        work_s=_summed(report.work_s) if report.HasField("work_s") else None,
        drafting_s=_summed(report.drafting_s) if report.HasField("drafting_s") else None,
    )


def _measured(value: float) -> float:
    """A peer's figure, or 0 (unknown) if it can be none."""
    return value if 0 < value < _MAX_FIGURE else 0.0


def _summed(seconds: float) -> float | None:
    """A peer's sum, or None (unknown) if it can be none."""
    return seconds if 0 <= seconds < _MAX_FIGURE else None


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
    return Ended(reason, stats, cached_tokens=end.cached_tokens)
