"""The Draft stream: speculators take assignments and commits, and send token trees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import structlog
from google.rpc import code_pb2

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError, TreeserveError
from treeserve_core.features import FeatureRows
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity, check_protocol
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice, Speculator
from treeserve_wire import codec, draft_codec
from treeserve_wire.channel import MAX_MESSAGE_BYTES
from treeserve_wire.credits import Credits, CreditWindow
from treeserve_wire.server import ServicerContext, write_all
from treeserve_wire.status import to_status
from treeserve_wire.tasks import until_first_ends

_log = structlog.get_logger(__name__)

_MAX_SOURCES = 16
_PROPOSAL_WINDOW = 64
# A frame is full beyond this. The entry that fills it adds at most a prompt, some 400 kB, and a window of features, a
# quarter of a message: well under 1 MiB in all.
_FULL_FRAME_BYTES = MAX_MESSAGE_BYTES // 4


class DraftStream:
    """What waits to be sent to one speculator. Commits of a sequence join while credit is out (a DraftOutbox)."""

    def __init__(self, credit: int, prices: Callable[[], Prices]) -> None:
        self.credits = Credits(credit)
        self._prices = prices
        self._assignments: dict[int, verifier_pb2.Assignment] = {}
        self._commits: dict[int, verifier_pb2.Commit] = {}
        self._released: list[int] = []
        self._free: list[verifier_pb2.DraftResponse] = []  # frames that cost no credit
        self._wake = asyncio.Event()

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        """A new sequence to draft for."""
        submission = sequence.submission
        sampling = replace(submission.sampling, grammar=None)  # which speculators do not know
        self._assignments[handle] = verifier_pb2.Assignment(
            handle=handle,
            token_ids=sequence.tokens,
            sampling=codec.sampling_to_proto(sampling),
            budget=budget,
            traceparent=submission.traceparent,
            prompt_tokens=sequence.prompt_len,
            acceptance=codec.acceptance_rule_to_proto(submission.limits.acceptance.rule),
            preset=submission.limits.preset,
            tenant=submission.tenant,
        )
        self._wake.set()

    def commit(self, notice: CommitNotice) -> None:
        """Progress of an assigned sequence; joins an assignment or commit that was not sent yet."""
        if (assignment := self._assignments.get(notice.handle)) is not None:
            assignment.token_ids.extend(notice.token_ids)
            assignment.budget = notice.budget
            return
        commit = self._commits.get(notice.handle)
        if commit is None:
            commit = verifier_pb2.Commit(handle=notice.handle, base_committed_len=notice.base_committed_len)
            self._commits[notice.handle] = commit
        commit.token_ids.extend(notice.token_ids)
        commit.top_tokens.extend(verifier_pb2.TopTokens(token_ids=ids) for ids in notice.top_token_ids)
        commit.budget = notice.budget
        self._wake.set()

    def features(self, handle: int, rows: FeatureRows) -> None:
        """Features of tokens that wait to be sent; of those that gathered while credit was out, only the latest."""
        waiting = self._assignments[handle] if handle in self._assignments else self._commits[handle]
        waiting.features.append(draft_codec.features_to_proto(rows))
        while len(waiting.features) > 1 and sum(len(block.values) for block in waiting.features) > _FULL_FRAME_BYTES:
            del waiting.features[0]

    def release(self, handle: int) -> None:
        """The sequence is no longer this speculator's."""
        self._commits.pop(handle, None)
        if self._assignments.pop(handle, None) is None:  # it knows of the sequence
            self._released.append(handle)
            self._wake.set()

    def send_free(self, frame: verifier_pb2.DraftResponse) -> None:
        """Queue a frame that costs no credit."""
        self._free.append(frame)
        self._wake.set()

    async def frames(self) -> AsyncIterator[verifier_pb2.DraftResponse]:
        """Frames to send, as they become due; endless."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._free:
                yield self._free.pop(0)
            while (self._assignments or self._commits or self._released) and self.credits.try_take():
                yield verifier_pb2.DraftResponse(update=self._next_update())

    def grant(self, frames: int) -> None:
        """The speculator processed some updates."""
        self.credits.grant(frames)
        self._wake.set()

    def _next_update(self) -> verifier_pb2.DraftUpdate:
        now = self._prices()
        prices = verifier_pb2.DraftPrices(token_us=now.token_s * 1e6, node=now.node)
        update = verifier_pb2.DraftUpdate(released=self._released, prices=prices)
        self._released = []
        size = 0
        while self._commits and size < _FULL_FRAME_BYTES:
            update.commits.append(self._commits.pop(next(iter(self._commits))))
            size += update.commits[-1].ByteSize()
        while self._assignments and size < _FULL_FRAME_BYTES:
            update.assignments.append(self._assignments.pop(next(iter(self._assignments))))
            size += update.assignments[-1].ByteSize()
        return update


class DraftHandler:
    """Serves Draft streams."""

    def __init__(
        self, config: VerifierConfig, identity: ModelIdentity, loop: VerifyLoop, metrics: VerifierMetrics
    ) -> None:
        self._config = config
        self._identity = identity
        self._loop = loop
        self._metrics = metrics
        # Twice as many as can be held: a tree may come for a sequence that has ended.
        self._max_proposals = 2 * (config.places + config.max_waiting)

    async def serve(self, requests: AsyncIterator[verifier_pb2.DraftRequest], context: ServicerContext) -> None:
        """One stream, from hello to end.

        Raises:
            HandshakeError: the speculator drafts for another model, tokenizer or protocol version.
            InvalidArgumentError: the framing is broken.
        """
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if first.WhichOneof("frame") != "hello":
            raise InvalidArgumentError("frame", "a Draft stream begins with a hello")
        hello = first.hello
        self._check_hello(hello)
        stream = DraftStream(hello.initial_credit, self._loop.prices)
        await context.write(self._welcome())
        wants_features = draft_codec.feature_shape_from_proto(hello.wants_features)
        speculator = self._loop.attach(
            hello.speculator_id,
            tuple(hello.sources),
            stream,
            hello.wants_top_tokens,
            wants_features if hello.HasField("wants_features") else None,
        )
        rules = codec.known_acceptance_rules(hello.acceptance_rules)
        _log.info(
            "speculator connected",
            speculator=speculator.name,
            sources=speculator.sources,
            acceptance_rules=sorted(rule.label for rule in rules),
            gets_features=speculator.wants_features,
        )
        try:
            await until_first_ends(self._read(stream, speculator, requests), write_all(context, stream.frames()))
        finally:
            self._loop.detach(speculator)
            _log.info("speculator disconnected", speculator=speculator.name)

    async def _read(
        self, stream: DraftStream, speculator: Speculator, requests: AsyncIterator[verifier_pb2.DraftRequest]
    ) -> None:
        window = CreditWindow(_PROPOSAL_WINDOW)
        async for request in requests:
            kind = request.WhichOneof("frame")
            if kind == "credit":
                stream.grant(request.credit.frames)
            elif kind == "proposals":
                self._take_proposals(stream, speculator, request.proposals)
                if frames := window.consume():
                    stream.send_free(verifier_pb2.DraftResponse(credit=verifier_pb2.Credit(frames=frames)))
            else:
                raise InvalidArgumentError("frame", f"{kind or 'an empty frame'} is not expected here")

    def _take_proposals(self, stream: DraftStream, speculator: Speculator, proposals: verifier_pb2.Proposals) -> None:
        """Take each tree; refuse malformed, late and unknown ones, each for itself."""
        if (count := len(proposals.proposals)) > self._max_proposals:  # they would hold up the steps
            raise InvalidArgumentError("proposals", f"{count} in a frame; one for each sequence is expected")
        # Those of a frame were drafted together, and each says how long that took.
        self._loop.drafted(max((message.draft_us for message in proposals.proposals), default=0) / 1e6)
        rejections = verifier_pb2.Rejections()
        for message in proposals.proposals:
            try:
                proposal = draft_codec.proposal_from_proto(
                    message,
                    vocab_size=self._identity.vocab_size,
                    max_nodes=self._config.max_nodes + 1,
                    max_depth=self._config.max_depth,
                    num_sources=len(speculator.sources),
                )
                self._loop.propose(speculator, message.handle, proposal)
            except TreeserveError as error:
                status = to_status(error)
                self._metrics.rejected_proposals.labels(code_pb2.Code.Name(status.code)).inc()
                rejections.rejections.add(handle=message.handle, status=status)
        if rejections.rejections:
            stream.send_free(verifier_pb2.DraftResponse(rejections=rejections))

    def _check_hello(self, hello: verifier_pb2.DraftHello) -> None:
        check_protocol(hello.protocol_version)
        theirs = codec.identity_from_proto(hello.model)
        self._identity.check_peer(theirs, own_role="verifier", peer_role="speculator")
        if not 1 <= len(hello.sources) <= _MAX_SOURCES or len(set(hello.sources)) != len(hello.sources):
            raise InvalidArgumentError("sources", f"names 1 to {_MAX_SOURCES} different sources")

    def _welcome(self) -> verifier_pb2.DraftResponse:
        features = self._loop.feature_shape
        return verifier_pb2.DraftResponse(
            welcome=verifier_pb2.DraftWelcome(
                protocol_version=PROTOCOL_VERSION,
                verifier_id=self._config.verifier_id,
                max_nodes=self._config.max_nodes + 1,
                max_depth=self._config.max_depth,
                initial_credit=_PROPOSAL_WINDOW,
                features=None if features is None else draft_codec.feature_shape_to_proto(features),
            )
        )
