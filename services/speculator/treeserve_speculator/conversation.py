"""One Draft stream after its welcome: takes in updates while the drafter's thread works, sends the newest trees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeAlias

import grpc
import structlog
from google.rpc import code_pb2

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureShape
from treeserve_core.proposal import DraftProposal
from treeserve_speculator.drafter import TreeLimits
from treeserve_speculator.messages import committed_from_proto, prices_from_proto, sequence_from_proto
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import CommittedTokens, DraftWork
from treeserve_speculator.session import DraftSession
from treeserve_wire.channel import MAX_MESSAGE_BYTES
from treeserve_wire.credits import Credits, CreditWindow
from treeserve_wire.draft_codec import feature_shape_from_proto, proposal_to_proto

DraftCall: TypeAlias = grpc.aio.StreamStreamCall[verifier_pb2.DraftRequest, verifier_pb2.DraftResponse]

CREDIT_WINDOW = 64
# Trees share a frame up to this size: those with draws take some hundred bytes for each expanded node.
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES // 2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class DraftPeer:
    """What all streams of a speculator share.

    Attributes:
        executor: one thread, which makes every call to the drafter and its sessions.
        new_session: makes the sequences of a stream from the verifier's tree limits.
        hello: first frame of each stream.
    """

    executor: Executor
    new_session: Callable[[TreeLimits], DraftSession]
    hello: verifier_pb2.DraftHello
    metrics: SpeculatorMetrics

    @property
    def vocab_size(self) -> int:
        """Token ids that may occur."""
        return self.hello.model.vocab_size

    @property
    def feature_shape(self) -> FeatureShape | None:
        """Of the target's hidden states, if some source wants them."""
        return feature_shape_from_proto(self.hello.wants_features) if self.hello.HasField("wants_features") else None


class Conversation:
    """Updates in, trees out. `read` and `draft` run side by side in one event loop, `draft` alone writes.

    Trees wait in an outbox, the newest per sequence, for the verifier's credit. A tree that was overtaken by a commit
    while it was drawn is moved along its path, and dropped if the commit left it.
    """

    def __init__(self, call: DraftCall, session: DraftSession, peer: DraftPeer, initial_credit: int) -> None:
        self._call = call
        self._session = session
        self._peer = peer
        self._credits = Credits(initial_credit)
        self._window = CreditWindow(CREDIT_WINDOW)
        self._inbox: list[DraftWork] = []
        self._outbox: dict[int, DraftProposal] = {}
        self._wake = asyncio.Event()

    async def read(self) -> None:
        """Take frames in until the stream ends.

        Raises:
            InvalidArgumentError: for a frame that has no place here.
            grpc.aio.AioRpcError: if the stream fails.
        """
        while isinstance(frame := await self._call.read(), verifier_pb2.DraftResponse):
            kind = frame.WhichOneof("frame")
            if kind == "update":
                self._take_in(self._work(frame.update))
            elif kind == "credit":
                self._credits.grant(frame.credit.frames)
            elif kind == "rejections":
                self._count(frame.rejections)
            else:
                raise InvalidArgumentError("frame", f"a frame with {kind} after the welcome")
            self._wake.set()

    async def draft(self) -> None:
        """Draft for what arrived, again and again. Ends only by cancellation or an error of the stream."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            works, self._inbox = self._inbox, []
            if works:
                drafted = await loop.run_in_executor(self._peer.executor, self._session.run, works)
                for handle, proposal in drafted:
                    self._put(handle, proposal)
            while self._outbox and self._credits.try_take():
                await self._send()
            if works:  # what the verifier does not wait for
                await self._return_credit(len(works))
                await loop.run_in_executor(self._peer.executor, self._session.learn)

    def _work(self, update: verifier_pb2.DraftUpdate) -> DraftWork:
        """The update without its malformed entries, whose sequences are dropped."""
        assigned, commits, released = [], [], list(update.released)
        vocab_size, feature_shape = self._peer.vocab_size, self._peer.feature_shape
        for assignment in update.assignments:
            try:
                assigned.append(sequence_from_proto(assignment, vocab_size, feature_shape))
            except InvalidArgumentError as error:
                self._malformed(assignment.handle, error)
        for commit in update.commits:
            try:
                commits.append(committed_from_proto(commit, vocab_size, feature_shape))
            except InvalidArgumentError as error:
                self._malformed(commit.handle, error)
                released.append(commit.handle)
        damaged = [*(s.features is None for s in assigned), *(c.features is None for c in commits)]
        self._peer.metrics.damaged_features.inc(sum(damaged))
        prices = prices_from_proto(update.prices) if update.HasField("prices") else None
        return DraftWork(tuple(assigned), tuple(commits), tuple(released), prices)

    def _malformed(self, handle: int, error: InvalidArgumentError) -> None:
        self._peer.metrics.protocol_errors.inc()
        _log.error("malformed update", handle=handle, reason=str(error))

    def _take_in(self, work: DraftWork) -> None:
        """Note an update. Waiting trees of its sequences are out of date; new ones follow if they are wanted."""
        for handle in work.handles:
            if self._outbox.pop(handle, None) is not None:
                self._peer.metrics.late_trees.inc()
        self._inbox.append(work)

    def _put(self, handle: int, proposal: DraftProposal) -> None:
        """Have a tree sent, moved along with the commits that arrived while it was drawn."""
        current = _moved_along(handle, proposal, self._inbox)
        if current is None:
            self._peer.metrics.late_trees.inc()
        else:
            self._outbox[handle] = current

    def _count(self, rejections: verifier_pb2.Rejections) -> None:
        for rejection in rejections.rejections:
            self._peer.metrics.rejections.labels(code_pb2.Code.Name(rejection.status.code)).inc()
            _log.debug("proposal refused", handle=rejection.handle, reason=rejection.status.message)

    async def _return_credit(self, processed: int) -> None:
        frames = sum(self._window.consume() for _ in range(processed))
        if frames:
            await self._call.write(verifier_pb2.DraftRequest(credit=verifier_pb2.Credit(frames=frames)))

    async def _send(self) -> None:
        """One frame of what waits; what does not fit waits for the next."""
        frame, size = verifier_pb2.Proposals(), 0
        for handle, proposal in list(self._outbox.items()):
            message = proposal_to_proto(handle, proposal)
            size += message.ByteSize()
            if frame.proposals and size > _MAX_FRAME_BYTES:
                break
            frame.proposals.append(message)
            del self._outbox[handle]
        await self._call.write(verifier_pb2.DraftRequest(proposals=frame))


def _moved_along(handle: int, proposal: DraftProposal, newer: Iterable[DraftWork]) -> DraftProposal | None:
    """The proposal after newer updates; None if its sequence left, or the committed tokens left nothing of the tree."""
    current: DraftProposal | None = proposal
    for work in newer:
        if handle in work.released or any(sequence.handle == handle for sequence in work.assigned):
            return None
        for committed in work.commits:
            if committed.handle == handle and current is not None:
                current = _after_commit(current, committed)
    return current


def _after_commit(proposal: DraftProposal, committed: CommittedTokens) -> DraftProposal | None:
    if committed.base_committed_len != proposal.base_committed_len:
        return None
    if not committed.token_ids:
        return proposal
    tree = proposal.tree.rerooted(committed.token_ids)
    tree = None if tree is None else tree.pruned(committed.budget)
    if tree is None or len(tree) == 1:
        return None  # a tree for the new root is being drawn: an empty one must not go ahead of it
    return replace(proposal, base_committed_len=len(committed.token_ids) + proposal.base_committed_len, tree=tree)
