"""A simulated speculator: draws trees one after another, and each arrives later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.features import FeatureRows
from treeserve_core.proposal import DraftProposal
from treeserve_simulator.costs import Overheads
from treeserve_simulator.text import Text
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice


class SimulatedSpeculator:
    """The far end of a Draft stream.

    Args:
        texts: by request id, what each sequence will say.
        propose: takes a handle and its tree at the verifier.
    """

    def __init__(
        self,
        overheads: Overheads,
        texts: Mapping[str, Text],
        max_depth: int,
        propose: Callable[[int, DraftProposal], None],
    ) -> None:
        self._overheads = overheads
        self._texts = texts
        self._max_depth = max_depth
        self._propose = propose
        self._sequences: dict[int, Sequence] = {}
        self._free_at = 0.0

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        """A sequence to draft for."""
        self._sequences[handle] = sequence
        self._draw(handle, len(sequence.tokens), budget)

    def commit(self, notice: CommitNotice) -> None:
        """Progress, which asks for a tree."""
        self._draw(notice.handle, notice.base_committed_len + len(notice.token_ids), notice.budget)

    def features(self, handle: int, rows: FeatureRows) -> None:
        """Of no use here."""

    def release(self, handle: int) -> None:
        """The sequence is no longer this speculator's."""
        self._sequences.pop(handle, None)

    def _draw(self, handle: int, base: int, budget: int) -> None:
        if budget == 0:
            return
        loop = asyncio.get_running_loop()
        network_s, draft_s = self._overheads.network_ms / 1e3, self._overheads.draft_ms / 1e3
        self._free_at = max(self._free_at, loop.time() + network_s) + draft_s
        loop.call_at(self._free_at + network_s, self._deliver, handle, base, budget)

    def _deliver(self, handle: int, base: int, budget: int) -> None:
        sequence = self._sequences.get(handle)
        if sequence is None:
            return
        tree = self._texts[sequence.submission.request_id].tree(base, budget, self._max_depth)
        with contextlib.suppress(StaleBaseError, NotFoundError):  # it came too late
            self._propose(handle, DraftProposal(base, tree))
