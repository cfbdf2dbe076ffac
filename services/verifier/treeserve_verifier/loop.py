"""The verify loop: plan, forward, accept, settle, emit; again and again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable

import structlog

from treeserve_core.errors import HandedBackError, InvalidArgumentError
from treeserve_core.features import FeatureShape
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.proposal import DraftProposal
from treeserve_kernels.cpu.decode_run import RanSequence
from treeserve_verifier.colocated import ColocatedOutbox
from treeserve_verifier.cost_model import CostModel, Prices
from treeserve_verifier.decode_run import FinishedRun, RunFollower, RunPlan, RunPlanner, stats_of
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.executor import NO_PLAIN_RUN, ExecutedStep, PlainRun, StepExecutor, StepResult
from treeserve_verifier.load import Load, SpeedMeter
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.seat import Seat
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import DraftOutbox, Speculator
from treeserve_verifier.step_plan import StepPlan
from treeserve_verifier.work import WorkMeter

_log = structlog.get_logger(__name__)


class Change(asyncio.Event):
    """An event that native code can see: `flag` is not 0 while it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = ctypes.c_int32()

    def set(self) -> None:
        """Set event and flag."""
        self.flag.value = 1
        super().set()

    def clear(self) -> None:
        """Clear both."""
        self.flag.value = 0
        super().clear()


class VerifyLoop:
    """Runs steps while there are sequences.

    All methods belong to the event loop; the executor alone runs in a thread, and while it does, the sequences of its
    plan are its own. `observers` are called when sequences emitted something or the load may have changed; after a
    step, not before the next one is under way or there is nothing to run: what they do delays no step.

    Args:
        clock: seconds, monotonic.
        run_ahead_s: steps may run that long without this loop, if nothing changes.
        colocated: a drafter in this process; None for speculators alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        desk: DraftDesk,
        planner: StepPlanner,
        executor: StepExecutor,
        cost: CostModel,
        metrics: VerifierMetrics,
        clock: Callable[[], float],
        run_ahead_s: float = 0.0,
        colocated: ColocatedOutbox | None = None,
    ) -> None:
        self._colocated = colocated
        if colocated is not None:
            colocated.attach(desk)
        self._run_ahead_s = run_ahead_s
        self._scheduler = scheduler
        self._desk = desk
        self._planner = planner
        self._executor = executor
        self._cost = cost
        self._metrics = metrics
        self._clock = clock
        self._speed = SpeedMeter()
        self._work = WorkMeter(cost)
        self._changed = Change()  # something happened that may make a step ready
        self._runs = RunPlanner(scheduler, desk, planner, executor, colocated, clock, run_ahead_s)
        self._must_plan = False  # the next step: a run of steps failed
        self._uncounted_runs: list[tuple[FinishedRun, float]] = []  # and milliseconds beside each of its steps
        self._stepping = asyncio.Lock()  # held while a step owns its sequences
        self._uncounted: list[tuple[ExecutedStep, float]] = []  # and its milliseconds, with all that is done for it
        self._at_work_since = clock()  # on the next step: since the last one was settled, or the last wait
        self._draining = False
        self._idle = asyncio.Event()  # nothing is left while draining
        self.observers: list[Callable[[], None]] = []

    def load(self) -> Load:
        """What this verifier can still take."""
        scheduler = self._scheduler
        return Load(
            sequences=len(scheduler),
            free_blocks=scheduler.free_blocks,
            speculators=len(self._desk.speculators),
            draining=self._draining,
            waiting=len(scheduler.waiting),
            preemptible=scheduler.preemptible,
            step_ms=self._speed.step_ms,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            work_s=self._work.work_s,
            drafting_s=self._work.drafting_s,
        )

    def prices(self) -> Prices:
        """What tokens and rows cost at present."""
        return self._planner.prices(len(self._scheduler.running))

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            OverloadedError: if too many wait already.
            HandedBackError: while draining.
        """
        if self._draining:
            raise HandedBackError("the verifier is draining")
        self._scheduler.submit(sequence)
        self._changed.set()

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; its blocks are free within a step."""
        self._scheduler.cancel(sequence)
        self._changed.set()
        self._notify()

    @property
    def feature_shape(self) -> FeatureShape | None:
        """Of the features that speculators can be sent; None for none."""
        return self._desk.feature_shape

    def attach(
        self,
        name: str,
        sources: tuple[str, ...],
        outbox: DraftOutbox,
        wants_top_tokens: bool,
        wants_features: FeatureShape | None = None,
    ) -> Speculator:
        """A speculator connected."""
        speculator = self._desk.attach(
            name, sources, outbox, wants_top_tokens=wants_top_tokens, wants_features=wants_features
        )
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

    def drafted(self, seconds: float) -> None:
        """A speculator spent this time on trees for this verifier."""
        self._work.drafted(seconds)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sequences, let running ones end, and hand back those that are left."""
        self._draining = True
        self._notify()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        async with self._stepping:
            self._scheduler.fail_all("the verifier shuts down")
        self._notify()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await self._until_ready()
            async with self._stepping:
                await self.step()

    async def step(self) -> None:
        """One step, or several in a row, as docs/architecture.md tells it."""
        for sequence in self._scheduler.admit():
            self._desk.open(sequence)
        if self._may_run() and (run := self._runs.plan(self._changed.flag)) is not None:
            await self._run_on(run)
            return
        self._must_plan = False
        self._draft_here()
        plan = self._scheduler.reserve(self._planner.plan(self._scheduler.candidates(self._desk.tree)))
        if not plan.sequences:
            self._catch_up()
            await asyncio.sleep(0)
            self._at_work_since = self._clock()
            return
        wanting = frozenset(p.sequence.seq_id for p in plan.sequences if self._desk.wants_top_tokens(p.sequence))
        features_for = frozenset(p.sequence.seq_id for p in plan.sequences if self._desk.wants_features(p.sequence))
        steps = await self._executor.run(plan, wanting, self._catch_up, self._plain_run(plan), features_for)
        for step in steps:
            self._settle_step(step)
        began, self._at_work_since = self._at_work_since, self._clock()
        step_ms = 1e3 * (self._at_work_since - began) / len(steps)
        self._uncounted += [(step, step_ms) for step in steps]
        if any(result.is_last for result in steps[-1].results):
            self._count()  # before the end leaves: who has a whole generation finds all its tokens counted

    def _may_run(self) -> bool:
        """Whether steps in a row may come next."""
        return not self._must_plan and self._runs.may_run()

    async def _run_on(self, plan: RunPlan) -> None:
        """Steps in a row, and what is to be learned of them."""
        run = await self._executor.run_on(plan, self._catch_up)
        node_costs = self._node_costs(run)
        for each in zip(plan.sequences, run.ran.sequences, run.followers, strict=True):
            self._settle_ran(plan.seats.get(each[0]), node_costs, *each)
        self._scheduler.calibrator.prior = run.ran.prior
        if run.ran.error is not None:
            _log.error("a run of steps failed", exc_info=run.ran.error)
            self._must_plan = True
        if plan.seats and self._colocated is not None:
            self._colocated.end_run(run.ran)
        began, self._at_work_since = self._at_work_since, self._clock()
        steps = run.ran.steps
        if steps:
            beside_ms = 1e3 * (self._at_work_since - began) - sum(step.step_ms for step in steps)
            self._uncounted_runs.append((run, max(0.0, beside_ms) / len(steps)))
        if any(follower.finish_reason is not None for follower in run.followers):
            self._count()

    def _node_costs(self, run: FinishedRun) -> list[float]:
        """What a draft node cost in each step, in tokens."""
        nodes = [sum(each.records[i].verified for each in run.ran.sequences) for i in range(len(run.ran.steps))]
        rows = [step.rows - step.prefill_rows for step in run.ran.steps]
        return [self._planner.cost_of_node(r, n, r - n) for r, n in zip(rows, nodes, strict=True)]

    def _settle_ran(
        self, seat: Seat | None, node_costs: list[float], sequence: Sequence, ran: RanSequence, follower: RunFollower
    ) -> None:
        base_len = len(sequence.tokens)
        sequence.calibration, sequence.verified = ran.calibration, ran.verified
        outcome = VerifyOutcome((), ran.token_ids, follower.finish_reason, tuple(follower.log_probs))
        if follower.error is not None:
            self._log_failure(sequence, follower.error)
        goes_on = self._scheduler.settle_run(sequence, outcome, stats_of(ran), follower.error)
        if goes_on and (seat is not None or ran.token_ids):  # else there is nothing to tell of it
            trees = [
                (r.accepted - cost * r.verified, r.accepted) for r, cost in zip(ran.records, node_costs, strict=True)
            ]
            self._desk.ran(sequence, base_len, seat, trees)

    def _plain_run(self, plan: StepPlan) -> PlainRun:
        """How many steps may follow this one unplanned: none that could differ if it were planned.

        Tokens leave at intervals, so one interval may pass before this loop looks again; it is called back as soon as
        anything changes, and in time to ask for the next tree.
        """
        until = self._clock() + self._run_ahead_s
        is_plain = all(p.rows == 1 and p.tree is not None for p in plan.sequences)
        if not is_plain or len(plan.sequences) < len(self._scheduler.running):
            return NO_PLAIN_RUN
        steps = min(self._desk.tokens_until_ask(p.sequence) for p in plan.sequences) - 1
        constrained = [p.sequence for p in plan.sequences if p.sequence.sampler.is_constrained]

        def may_go_on() -> bool:
            in_time = not self._changed.is_set() and self._clock() < until
            return in_time and not any(map(self._desk.has_forced, constrained))

        return PlainRun(steps, may_go_on)

    def _settle_step(self, step: ExecutedStep) -> None:
        node_cost = self._planner.node_cost(step.plan)
        for result in step.results:
            self._settle(result, node_cost)

    async def _until_ready(self) -> None:
        """Return when a step should run: there is work, and no tree worth waiting for is missing."""
        waiting_since: float | None = None
        while True:
            self._changed.clear()
            if self._may_run():
                break  # nothing is asked for: a run drafts by itself
            self._draft_here()
            if len(self._scheduler) == 0:
                self._catch_up()
                await self._changed.wait()
                self._at_work_since = self._clock()
                continue
            decoding = [s for s in self._scheduler.running if self._scheduler.uncomputed(s) == 1]
            now, until = self._clock(), self._desk.wait_until(decoding)
            if until <= now:
                break
            if waiting_since is None:
                waiting_since = now
                await asyncio.sleep(0)  # the asks leave first
                self._catch_up()
            alarm = asyncio.get_running_loop().call_later(until - now, self._changed.set)
            await self._changed.wait()
            alarm.cancel()
            self._at_work_since += self._clock() - now
        if waiting_since is not None:
            self._metrics.tree_waits.inc()
            self._metrics.tree_wait_seconds.inc(now - waiting_since)

    def _draft_here(self) -> None:
        """Take the trees of the drafter in this process."""
        if self._colocated is not None:
            self._desk.after_runs(self._scheduler.running)
            self._colocated.draft(self.prices)

    def _settle(self, result: StepResult, node_cost: float) -> None:
        sequence = result.planned.sequence
        if result.error is not None:
            self._log_failure(sequence, result.error)
            self._scheduler.settle_failed(result.planned, result.error)
            return
        base_len = len(sequence.tokens)
        self._scheduler.settle(result.planned, result.outcome)
        if result.features is not None:
            self._desk.computed(sequence, result.features)
        if result.outcome is None:
            return
        if result.outcome.finish_reason is None and not sequence.cancelled:
            nodes = result.planned.rows - result.planned.chunk
            self._desk.committed(sequence, base_len, result.top_token_ids, spent=node_cost * nodes)

    def _log_failure(self, sequence: Sequence, error: Exception) -> None:
        request_id = sequence.submission.request_id
        if isinstance(error, InvalidArgumentError):  # the client's fault: a grammar that takes more than its share
            _log.info("sequence refused", request_id=request_id, error=str(error))
        else:
            _log.error("sequence failed", request_id=request_id, exc_info=error)

    def _catch_up(self) -> None:
        """Do what a step left for later: count it, and have its tokens sent."""
        self._count()
        self._notify()
        if self._colocated is not None:
            self._colocated.learn()

    def _count(self) -> None:
        steps, self._uncounted = self._uncounted, []
        for step, step_ms in steps:
            self._metrics.count(step, self._desk.source_names)
            if step.forward_ms:  # it did not fail
                plan = step.plan
                self._cost.observe(plan.rows - plan.prefill_rows, step_ms, plan.prefill_rows, plan.attended)
                self._speed.observe(plan.prefill_rows, step_ms)
                self._work.did(step.results, self._scheduler.capacity)
        runs, self._uncounted_runs = self._uncounted_runs, []
        for run, beside_ms in runs:
            self._count_run(run, beside_ms)
        self._metrics.count_gaps(self._scheduler.take_gaps_s())

    def _count_run(self, run: FinishedRun, beside_ms: float) -> None:
        mask = self._colocated.source_mask if self._colocated is not None else lambda bit: 0
        self._metrics.count_run(run, lambda bit: self._desk.source_names(mask(bit)))
        for step in run.ran.steps:
            step_ms, rows = step.step_ms + beside_ms, step.rows - step.prefill_rows
            self._cost.observe(rows, step_ms, step.prefill_rows, step.attended)
            self._speed.observe(step.prefill_rows, step_ms)
        self._work.ran(run, self._scheduler.capacity)

    def _notify(self) -> None:
        if self._draining and len(self._scheduler) == 0:
            self._idle.set()
        for observer in self.observers:
            observer()
