"""The link to one verifier: shakes hands, keeps a Decode stream, and connects again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import grpc
import structlog

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve.verifier.v1.verifier_pb2_grpc import VerifierServiceStub
from treeserve_core.errors import HandshakeError, TreeserveError
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity, check_protocol
from treeserve_router.decode_stream import DecodeCall, DecodeStream, read_frame
from treeserve_router.ledger import VerifierOffer
from treeserve_router.mailbox import Lost
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket
from treeserve_wire import codec
from treeserve_wire.backoff import Backoff
from treeserve_wire.channel import open_channel
from treeserve_wire.status import error_from_rpc
from treeserve_wire.tls import Tls, with_hint

_WELCOME_TIMEOUT_S = 5.0
_BACKOFF = Backoff()

_log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def dial(address: str, tls: Tls | None = None) -> AsyncIterator[DecodeCall]:
    """A Decode call to an address, over a channel of its own, with the credentials as they are now."""
    async with open_channel(address, tls) as channel:
        yield VerifierServiceStub(channel).Decode()


class VerifierLink:
    """Keeps a Decode stream to one address.

    Args:
        model: what this router tokenises for; a verifier of anything else is refused.
        token_credit: token frames the verifier may have in flight.
        on_change: called after anything that placement may care about: connection, load, room.
        rng: for the jitter of waits.
        dial: opens the call.
    """

    def __init__(
        self,
        address: str,
        model: ModelIdentity,
        router_id: str,
        token_credit: int,
        on_change: Callable[[], None],
        rng: random.Random,
        dial: Callable[[str], AbstractAsyncContextManager[DecodeCall]] = dial,
    ) -> None:
        self.address = address
        self._model = model
        self._hello = pb.DecodeHello(
            protocol_version=PROTOCOL_VERSION, router_id=router_id, initial_credit=token_credit
        )
        self._token_credit = token_credit
        self._on_change = on_change
        self._rng = rng
        self._dial = dial
        self._failures = 0
        self._stream: DecodeStream | None = None

    @property
    def state(self) -> VerifierState | None:
        """What placement may know of the verifier; None while it is not connected."""
        return self._stream.state if self._stream is not None else None

    @property
    def offer(self) -> VerifierOffer | None:
        """What the verifier said of itself; None while it is not connected."""
        return self._stream.offer if self._stream is not None else None

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs here."""
        return self._stream is None or self._stream.is_idle

    def submit(self, ticket: Ticket, waited_s: float = 0.0) -> None:
        """Run a ticket's sequence on this verifier; a link that is down reports it lost at once.

        Args:
            waited_s: how long its request has waited already.
        """
        if self._stream is None:
            ticket.mailbox.put(Lost(self.address, "not connected"))
        else:
            self._stream.submit(ticket, waited_s)

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket's sequence; nothing happens if it is not here any more."""
        if self._stream is not None:
            self._stream.cancel(ticket)

    def suspect(self) -> bool:
        """Ask for a sign of life and have placement avoid it until one comes; whether it was asked before."""
        return self._stream is not None and self._stream.suspect()

    async def run(self) -> None:
        """Connect, serve, and connect again with growing pauses, until cancelled."""
        while True:
            try:
                async with self._dial(self.address) as call:
                    stream = await self._open(call)
                    self._failures = 0
                    await self._serve(stream)
            except Exception as error:  # whatever ended this stream, the next one may work
                self._report_down(error)
            self._failures += 1
            await asyncio.sleep(_BACKOFF.wait_s(self._failures, self._rng))

    async def _open(self, call: DecodeCall) -> DecodeStream:
        """Shake hands. Raises HandshakeError if the verifier serves something else."""
        async with asyncio.timeout(_WELCOME_TIMEOUT_S):
            await call.write(pb.DecodeRequest(hello=self._hello))
            frame = await read_frame(call)
        if frame.WhichOneof("frame") != "welcome":
            raise HandshakeError("the verifier's first frame is no welcome")
        offer = _offer(frame.welcome)
        self._check(offer)
        return DecodeStream(self.address, call, offer, self._token_credit, self._on_change)

    def _check(self, offer: VerifierOffer) -> None:
        self._model.check_peer(offer.model, own_role="router", peer_role="verifier")
        if offer.max_sequences < 1 or offer.max_context_tokens < 1:
            raise HandshakeError("the verifier takes no sequences")

    async def _serve(self, stream: DecodeStream) -> None:
        _log.info("verifier connected", address=self.address, verifier_id=stream.offer.verifier_id)
        self._stream = stream
        self._on_change()
        try:
            await stream.run()
        finally:
            self._stream = None
            stream.lose_all("the stream to the verifier broke")
            self._on_change()

    def _report_down(self, error: Exception) -> None:
        if isinstance(error, grpc.RpcError):
            error = error_from_rpc(error)
        expected = isinstance(error, TreeserveError | TimeoutError)
        reason = with_hint(str(error) or type(error).__name__)
        _log.warning("verifier not connected", address=self.address, reason=reason, exc_info=not expected)


def _offer(welcome: pb.DecodeWelcome) -> VerifierOffer:
    """Decode a welcome. Raises HandshakeError if the verifier speaks another protocol version."""
    check_protocol(welcome.protocol_version)
    return VerifierOffer(
        verifier_id=welcome.verifier_id,
        model=codec.identity_from_proto(welcome.model),
        max_context_tokens=welcome.max_context_tokens,
        max_sequences=welcome.max_sequences,
        dtype=welcome.dtype,
        acceptance_rules=codec.known_acceptance_rules(welcome.acceptance_rules),
        block_size=welcome.block_size,
        grammars=welcome.grammars,
    )
