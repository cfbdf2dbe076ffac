"""A drafter in the verifier's own process, told as any speculator is, and asked before each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Protocol, cast, runtime_checkable

import structlog
from prometheus_client import CollectorRegistry

from treeserve_core.errors import InvalidArgumentError, StaleBaseError
from treeserve_core.features import FeatureRows
from treeserve_core.identity import ModelIdentity
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_kernels.cpu.decode_run import Ran
from treeserve_kernels.cpu.structures import DrafterCalls
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice, Speculator

_log = structlog.get_logger(__name__)


class Drafter(Protocol):
    """What drafts here (treeserve_speculator.colocated). Not a speculator: it has neither stream nor credit."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of its draft sources."""

    @property
    def wants_top_tokens(self) -> bool:
        """Whether commits are to bring the target's most probable tokens."""

    @property
    def is_due(self) -> bool:
        """Whether it was asked for a tree since it drafted."""

    def assign(
        self,
        handle: int,
        token_ids: SequenceOf[int],
        prompt_len: int,
        sampling: SamplingParams,
        limits: SequenceLimits,
        tenant: str,
        budget: int,
    ) -> None:
        """Meet a sequence; a budget of 0 asks for no tree yet."""

    def commit(
        self,
        handle: int,
        base_committed_len: int,
        token_ids: tuple[int, ...],
        budget: int,
        top_token_ids: tuple[SequenceOf[int], ...],
    ) -> None:
        """Progress of a sequence; a positive budget asks for a tree."""

    def release(self, handle: int) -> None:
        """Forget a sequence."""

    def draft(self, token_us: float, node: float) -> list[tuple[int, DraftProposal]]:
        """Trees for what was asked, by handle."""

    def learn(self) -> None:
        """Learn from what it was told: when nobody waits."""


@runtime_checkable
class RunDrafter(Drafter, Protocol):
    """A drafter that native code can call, for steps in a row."""

    def begin_run(self, handles: SequenceOf[int]) -> DrafterCalls:
        """What to call for these sequences; trees that were asked for them are drafted by the run.

        Other methods may be called meanwhile, but for `assign`, `commit`, `draft` and `release` of these.
        """

    def end_run(self, trees: int, empty_trees: int, seconds: float) -> None:
        """A run drafted so many trees, so many of them with nothing but a root."""


class ColocatedOutbox:
    """Hands what the desk says to the drafter, and its trees to the desk (a DraftOutbox).

    A drafter that raises is never called again, and leaves the desk: that costs speed and nothing else.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter: Drafter | None = drafter  # None after it failed
        self._desk: DraftDesk | None = None
        self._in_run: Drafter | None = None  # kept for a run, which has but its address
        self._speculator: Speculator | None = None

    def attach(self, desk: DraftDesk) -> None:
        """Take a share of the desk's sequences from now on."""
        drafter = self._drafter
        assert drafter is not None  # it was not called yet
        self._desk = desk
        self._speculator = desk.attach(
            "colocated", drafter.sources, self, wants_top_tokens=drafter.wants_top_tokens, is_colocated=True
        )

    def draft(self, prices: Callable[[], Prices]) -> None:
        """Give the desk the trees it asked for."""
        self._call(lambda drafter: self._propose(drafter, prices))
        if self._drafter is None:
            self._detach()  # here alone: the other calls come from within the desk

    def learn(self) -> None:
        """Learn from the commits: when nobody waits."""
        self._call(lambda drafter: drafter.learn())

    @property
    def wants_top_tokens(self) -> bool:
        """Whether the drafter does."""
        return self._drafter is not None and self._drafter.wants_top_tokens

    @property
    def can_run(self) -> bool:
        """Whether native code can call the drafter."""
        return isinstance(self._drafter, RunDrafter)

    def begin_run(self, handles: SequenceOf[int]) -> DrafterCalls | None:
        """What a run of steps calls for these sequences; None if the drafter has failed."""
        calls: list[DrafterCalls] = []
        self._in_run = self._drafter
        if self.can_run:
            self._call(lambda drafter: calls.append(cast(RunDrafter, drafter).begin_run(handles)))
        return calls[0] if calls else None

    def end_run(self, ran: Ran) -> None:
        """Such a run is over."""
        self._in_run = None

        def note(drafter: Drafter) -> None:
            cast(RunDrafter, drafter).end_run(ran.num_trees, ran.num_empty_trees, ran.draft_s)
            if ran.drafter_failed:
                raise RuntimeError("a call within a run of steps failed")

        self._call(note)
        if ran.num_trees and self._speculator is not None:
            self._speculator.drafted(ran.draft_s / ran.num_trees)

    def source_mask(self, bit: int) -> int:
        """The mask, as the desk numbers sources, of the source with this bit in the drafter's trees."""
        return 1 << self._speculator.source_bits[bit] if self._speculator is not None else 0

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        """A new sequence to draft for."""
        submission = sequence.submission
        sampling = replace(submission.sampling, grammar=None)  # which drafters do not know
        self._call(
            lambda drafter: drafter.assign(
                handle,
                sequence.tokens,
                sequence.prompt_len,
                sampling,
                submission.limits,
                submission.tenant,
                budget,
            )
        )

    def commit(self, notice: CommitNotice) -> None:
        """Progress of an assigned sequence."""
        self._call(
            lambda drafter: drafter.commit(
                notice.handle, notice.base_committed_len, notice.token_ids, notice.budget, notice.top_token_ids
            )
        )

    def features(self, handle: int, rows: FeatureRows) -> None:
        """Nothing: its sources want none."""

    def release(self, handle: int) -> None:
        """The sequence has ended."""
        self._call(lambda drafter: drafter.release(handle))

    def _call(self, call: Callable[[Drafter], None]) -> None:
        if self._drafter is None:
            return
        try:
            call(self._drafter)
        except Exception:
            _log.exception("the drafter in this process failed: decoding goes on without it")
            self._drafter = None

    def _propose(self, drafter: Drafter, prices: Callable[[], Prices]) -> None:
        assert self._desk is not None and self._speculator is not None  # attached
        if not drafter.is_due:
            return
        now = prices()
        for handle, proposal in drafter.draft(now.token_s * 1e6, now.node):
            with contextlib.suppress(StaleBaseError):  # the sequence went on without it
                self._desk.propose(self._speculator, handle, proposal)

    def _detach(self) -> None:
        if self._desk is not None and self._speculator is not None:
            self._desk.detach(self._speculator)
            self._speculator = None


def build_colocated(
    config: VerifierConfig, identity: ModelIdentity, registry: CollectorRegistry
) -> ColocatedOutbox | None:
    """What `colocated_sources` asks for, its metrics beside the verifier's; None if that is nothing.

    Raises:
        InvalidArgumentError: if it cannot be built.
    """
    if not config.colocated_sources:
        return None
    try:
        build = EntryPoint("colocated", config.colocated_drafter, "").load()
    except Exception as error:  # importing runs whatever the module holds
        reason = f"{config.colocated_drafter!r} cannot be loaded: {error!r}"
        raise InvalidArgumentError("colocated_drafter", reason) from error
    drafter = build(
        identity,
        config.model_folder,
        config.colocated_sources,
        config.drafter_folder,
        config.max_nodes,
        config.max_depth,
        registry,
    )
    return None if drafter is None else ColocatedOutbox(cast(Drafter, drafter))
