"""The verify loop: plan, forward, accept, settle, emit; again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from treeserve_core.errors import UnavailableError
from treeserve_core.proposal import DraftProposal
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.drafting import DraftDesk, DraftOutbox, Speculator
from treeserve_verifier.executor import StepExecutor, StepResult
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import Candidate, StepPlan, StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Sequence

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Load:
    """Sequences held, free KV blocks, attached speculators; a draining verifier takes nothing more."""

    sequences: int
    free_blocks: int
    speculators: int
    draining: bool


class VerifyLoop:
    """Runs steps while there are sequences.

    All methods belong to the event loop; the executor alone runs in a thread, and while it does, the sequences of its
    plan are its own. `observers` are called whenever the load may have changed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        desk: DraftDesk,
        planner: StepPlanner,
        executor: StepExecutor,
        cost: CostModel,
        metrics: VerifierMetrics,
    ) -> None:
        self._scheduler = scheduler
        self._desk = desk
        self._planner = planner
        self._executor = executor
        self._cost = cost
        self._metrics = metrics
        self._changed = asyncio.Event()  # something happened that may make a step ready
        self._stepping = asyncio.Lock()  # held while a step owns its sequences
        self._draining = False
        self._idle = asyncio.Event()  # nothing is left while draining
        self.observers: list[Callable[[], None]] = []

    def load(self) -> Load:
        """What this verifier can still take."""
        speculators = len(self._desk.speculators)
        return Load(len(self._scheduler), self._scheduler.free_blocks, speculators, self._draining)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            OverloadedError: if too many wait already.
            UnavailableError: while draining.
        """
        if self._draining:
            raise UnavailableError("the verifier is draining")
        self._scheduler.submit(sequence)
        self._changed.set()

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; its blocks are free within a step."""
        self._scheduler.cancel(sequence)
        self._changed.set()
        self._notify()

    def attach(self, name: str, sources: tuple[str, ...], outbox: DraftOutbox, wants_top_tokens: bool) -> Speculator:
        """A speculator connected."""
        speculator = self._desk.attach(name, sources, outbox, wants_top_tokens=wants_top_tokens)
        self._notify()
        return speculator

    def detach(self, speculator: Speculator) -> None:
        """A speculator's stream ended."""
        self._desk.detach(speculator)
        self._changed.set()
        self._notify()

    def propose(self, speculator: Speculator, handle: int, proposal: DraftProposal) -> None:
        """A tree arrived. Raises what `DraftDesk.propose` raises."""
        if self._desk.propose(speculator, handle, proposal) is not None:
            self._changed.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sequences, let running ones end, and fail those that are left with UNAVAILABLE."""
        self._draining = True
        self._notify()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        async with self._stepping:
            self._scheduler.fail_all("the verifier shuts down")

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await self._until_ready()
            async with self._stepping:
                await self.step()

    async def step(self) -> None:
        """One step, as docs/architecture.md tells it."""
        plan = self._scheduler.reserve(self._planner.plan(self._candidates()))
        if not plan.sequences:
            await asyncio.sleep(0)
            return
        wanting = frozenset(p.sequence.seq_id for p in plan.sequences if self._desk.wants_top_tokens(p.sequence))
        step = await self._executor.run(plan, wanting)
        if step.forward_ms:
            self._cost.observe(plan.rows, step.forward_ms)
        self._count_step(plan, step.forward_ms)
        for result in step.results:
            self._settle(result)
        self._notify()

    def _candidates(self) -> list[Candidate]:
        for sequence in self._scheduler.admit():
            self._desk.open(sequence)
        return [
            Candidate(s, uncomputed, self._desk.tree(s) if uncomputed == 1 else None)
            for s in self._scheduler.running
            for uncomputed in (self._scheduler.uncomputed(s),)
        ]

    async def _until_ready(self) -> None:
        """Return when a step should run: there is work, and no tree worth waiting for is missing."""
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            if len(self._scheduler) > 0:
                decoding = [s for s in self._scheduler.running if self._scheduler.uncomputed(s) == 1]
                wait_s = max((self._desk.wait_until(s) for s in decoding), default=0.0) - clock()
                if wait_s <= 0:
                    return
            else:
                wait_s = None
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return

    def _settle(self, result: StepResult) -> None:
        sequence = result.planned.sequence
        if result.error is not None:
            _log.error("sequence failed", request_id=sequence.submission.request_id, exc_info=result.error)
            self._scheduler.settle_failed(result.planned, result.error)
            return
        base_len = len(sequence.tokens)
        self._scheduler.settle(result.planned, result.outcome)
        if result.outcome is None:
            return
        self._count_outcome(result)
        if result.outcome.finish_reason is None and not sequence.cancelled:
            self._desk.committed(sequence, base_len, result.top_token_ids)

    def _notify(self) -> None:
        if self._draining and len(self._scheduler) == 0:
            self._idle.set()
        for observer in self.observers:
            observer()

    def _count_step(self, plan: StepPlan, forward_ms: float) -> None:
        self._metrics.step_duration.observe(forward_ms / 1e3)
        self._metrics.step_rows.observe(plan.rows)
        self._metrics.prefill_tokens.inc(sum(p.chunk - (p.tree is not None) for p in plan.sequences))

    def _count_outcome(self, result: StepResult) -> None:
        outcome, tree = result.outcome, result.planned.tree
        assert outcome is not None and tree is not None
        self._metrics.emitted_tokens.inc(len(outcome.token_ids))
        if len(tree) == 1:
            return
        self._metrics.drafts.inc()
        self._metrics.draft_tokens.inc(len(tree) - 1)
        self._metrics.accepted_tokens.inc(len(outcome.accepted_nodes))
        for depth, node in enumerate(outcome.accepted_nodes):
            self._metrics.accepted_per_pos.labels(depth).inc()
            if tree.source_masks is not None:
                for source in self._desk.source_names(tree.source_masks[node]):
                    self._metrics.accepted_per_source.labels(source).inc()
