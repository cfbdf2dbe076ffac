"""The sequences of one verifier's stream: applies its updates and drafts what became due."""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from opentelemetry import trace

from treeserve_core.errors import StaleBaseError
from treeserve_core.proposal import DraftProposal
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import UNPRICED, CommittedTokens, DraftSequence, DraftWork
from treeserve_wire.telemetry import context_from

_log = structlog.get_logger(__name__)


class DraftSession:
    """Sequences by handle, for as long as a stream lives. Not thread-safe: the drafter's thread makes all calls."""

    def __init__(self, drafter: Drafter, limits: TreeLimits, metrics: SpeculatorMetrics, tracer: trace.Tracer) -> None:
        self._drafter = drafter
        self._limits = limits
        self._metrics = metrics
        self._tracer = tracer
        self._prices = UNPRICED
        self._sequences: dict[int, DraftSequence] = {}
        self._spans: dict[int, trace.Span] = {}

    def run(self, works: Iterable[DraftWork]) -> list[tuple[int, DraftProposal]]:
        """Apply updates in order, then draft for every sequence they touched that may have nodes.

        A commit that does not follow what is known drops its sequence: the verifier goes on without trees for it.
        """
        touched: dict[int, None] = {}
        for work in works:
            self._prices = work.prices or self._prices
            for sequence in work.assigned:
                self._open(sequence)
                touched[sequence.handle] = None
            for committed in work.commits:
                self._commit(committed)
                touched[committed.handle] = None
            for handle in work.released:
                self._close(handle)
        due = [s for s in map(self._sequences.get, touched) if s is not None and s.budget > 0]
        if not due:
            return []
        proposals = self._drafter.draft(due, self._limits, self._prices)
        return [(sequence.handle, proposal) for sequence, proposal in zip(due, proposals, strict=True)]

    def learn(self) -> None:
        """Learn from the updates: when their trees have left, because it delays the next ones."""
        self._drafter.learn()

    def close(self) -> None:
        """Let go of all sequences: the stream has ended."""
        for handle in list(self._sequences):
            self._close(handle)

    def _open(self, sequence: DraftSequence) -> None:
        if sequence.handle in self._sequences:
            self._protocol_error(sequence.handle, "assigned twice")
        self._sequences[sequence.handle] = sequence
        if sequence.traceparent:
            context = context_from(sequence.traceparent)
            self._spans[sequence.handle] = self._tracer.start_span("treeserve.draft", context=context)
        self._drafter.open(sequence)

    def _commit(self, committed: CommittedTokens) -> None:
        sequence = self._sequences.get(committed.handle)
        if sequence is None:  # released or dropped a moment ago
            return
        try:
            self._drafter.commit(sequence, committed)
        except StaleBaseError as error:
            self._protocol_error(committed.handle, str(error))

    def _protocol_error(self, handle: int, reason: str) -> None:
        self._metrics.protocol_errors.inc()
        _log.error("sequence dropped", handle=handle, reason=reason)
        self._close(handle)

    def _close(self, handle: int) -> None:
        sequence = self._sequences.pop(handle, None)
        if sequence is not None:
            self._drafter.close(sequence)
        if (span := self._spans.pop(handle, None)) is not None:
            span.end()
