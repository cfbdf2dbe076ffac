"""Keeps one verifier supplied with trees: opens a Draft stream, drafts on every update, reconnects when it breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import structlog

from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import HandshakeError, TreeserveError, UnavailableError
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity, check_protocol
from treeserve_speculator.conversation import CREDIT_WINDOW, Conversation, DraftCall, DraftPeer
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_wire.backoff import Backoff
from treeserve_wire.channel import open_channel
from treeserve_wire.codec import acceptance_rule_to_proto, identity_to_proto
from treeserve_wire.draft_codec import feature_shape_to_proto
from treeserve_wire.status import error_from_rpc
from treeserve_wire.tls import Tls, with_hint

_WELCOME_TIMEOUT_S = 5.0
_STOP_GRACE_S = 1.0
_BACKOFF = Backoff()
_REFUSED_WAIT_S = 30.0

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


def draft_hello(speculator_id: str, identity: ModelIdentity, drafter: Drafter) -> verifier_pb2.DraftHello:
    """The first frame of every stream."""
    features = drafter.feature_shape
    return verifier_pb2.DraftHello(
        protocol_version=PROTOCOL_VERSION,
        speculator_id=speculator_id,
        model=identity_to_proto(identity),
        sources=drafter.source_names,
        initial_credit=CREDIT_WINDOW,
        wants_top_tokens=drafter.wants_top_tokens,
        wants_features=None if features is None else feature_shape_to_proto(features),
        acceptance_rules=[acceptance_rule_to_proto(rule) for rule in AcceptanceRule],
    )


class DraftClient:
    """Serves one verifier until stopped; a verifier that is away or refuses is tried again as long as it is wanted.

    Args:
        rng: for the jitter of waits.
        refused_s: wait after a refused handshake, which the next attempt will hardly change.
        tls: credentials to the verifier, as they are at each attempt; plaintext without.
    """

    def __init__(
        self,
        address: str,
        peer: DraftPeer,
        rng: random.Random,
        backoff: Backoff = _BACKOFF,
        refused_s: float = _REFUSED_WAIT_S,
        tls: Tls | None = None,
    ) -> None:
        self._address = address
        self._peer = peer
        self._rng = rng
        self._backoff = backoff
        self._refused_s = refused_s
        self._tls = tls
        self._failures = 0
        self.wanted = True
        self._stopping = asyncio.Event()
        self._log = _log.bind(verifier=address)

    def stop(self) -> None:
        """Let `run` end the stream and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Hold a stream until `stop`, or until one ends while it is not wanted."""
        while self.wanted and not self._stopping.is_set():
            wait_s = await self._attempt()
            await self._unless_stopped(asyncio.sleep(wait_s))

    async def _attempt(self) -> float:
        """Hold one stream, over a channel of its own, to its end; returns the seconds to wait before the next."""
        try:
            async with open_channel(self._address, self._tls) as channel:
                await self._hold(verifier_pb2_grpc.VerifierServiceStub(channel).Draft())
            error: Exception = TreeserveError("the verifier ended the stream")
        except grpc.aio.AioRpcError as failed:
            error = error_from_rpc(failed)
        except Exception as failed:
            error = failed
        if self._stopping.is_set():
            return 0.0
        if isinstance(error, HandshakeError):
            self._log.error("verifier refused the handshake", reason=str(error))
            return self._refused_s
        self._failures += 1
        wait_s = self._backoff.wait_s(self._failures, self._rng)
        if isinstance(error, TreeserveError):
            self._log.warning("draft stream ended", reason=with_hint(str(error)), retry_in_s=round(wait_s, 2))
        else:
            self._log.error("draft stream failed", retry_in_s=round(wait_s, 2), exc_info=error)
        return wait_s

    async def _hold(self, call: DraftCall) -> None:
        try:
            await call.write(verifier_pb2.DraftRequest(hello=self._peer.hello))
            welcome = await self._unless_stopped(_read_welcome(call))
            if welcome is None:
                return
            self._failures = 0
            self._log.info("draft stream open", verifier_id=welcome.verifier_id)
            self._check_features(welcome)
            limits = TreeLimits(max_nodes=welcome.max_nodes - 1, max_depth=welcome.max_depth)
            session = self._peer.new_session(limits)
            self._peer.metrics.streams.inc()
            try:
                conversation = Conversation(call, session, self._peer, welcome.initial_credit)
                await self._converse(call, conversation)
            finally:
                self._peer.metrics.streams.dec()
                await asyncio.get_running_loop().run_in_executor(self._peer.executor, session.close)
        finally:
            call.cancel()

    def _check_features(self, welcome: verifier_pb2.DraftWelcome) -> None:
        hello = self._peer.hello
        if hello.HasField("wants_features") and hello.wants_features != welcome.features:
            self._log.warning(
                "the verifier cannot send the hidden states that a draft source needs: it stays off there",
                wanted=str(hello.wants_features),
                has=str(welcome.features),
            )

    async def _unless_stopped(self, coroutine: Coroutine[Any, Any, _T]) -> _T | None:
        """The coroutine's result; None, and the coroutine cancelled, if `stop` comes first."""
        task, stopping = asyncio.create_task(coroutine), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopping.cancel()

    async def _converse(self, call: DraftCall, conversation: Conversation) -> None:
        """Read and draft side by side until the stream ends, one of them fails, or `stop`."""
        reading = asyncio.create_task(conversation.read())
        drafting = asyncio.create_task(conversation.draft())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((reading, drafting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not reading.done():
                drafting.cancel()
                await asyncio.wait((drafting,))
                await call.done_writing()
                await asyncio.wait((reading,), timeout=_STOP_GRACE_S)
        finally:
            for task in (reading, drafting, stopping):
                task.cancel()
            results = await asyncio.gather(reading, drafting, return_exceptions=True)
        for result in results:  # the reader first: it knows the stream's status
            if isinstance(result, Exception):
                raise result


async def _read_welcome(call: DraftCall) -> verifier_pb2.DraftWelcome:
    try:
        frame = await asyncio.wait_for(call.read(), _WELCOME_TIMEOUT_S)
    except TimeoutError:
        raise UnavailableError(f"no welcome within {_WELCOME_TIMEOUT_S:g} s") from None
    if not isinstance(frame, verifier_pb2.DraftResponse):
        raise TreeserveError("the verifier ended the stream before its welcome")
    if frame.WhichOneof("frame") != "welcome":
        raise HandshakeError("the verifier's first frame is no welcome")
    check_protocol(frame.welcome.protocol_version)
    return frame.welcome
