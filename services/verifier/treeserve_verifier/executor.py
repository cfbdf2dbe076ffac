"""Runs a step plan on the engine: one forward pass, then acceptance and KV compaction for each sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import UnavailableError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import accept
from treeserve_engine.batch import SequenceRows
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.interface import DeviceModel, HiddenModel, Model, RunModel
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decode_run import Ran
from treeserve_verifier.decode_run import FinishedRun, RunFollower, RunPlan
from treeserve_verifier.step_plan import PlannedSequence, StepPlan
from treeserve_verifier.top_tokens import TOP_TOKENS, TopTokens

Result = TypeVar("Result")

Accepted = tuple[VerifyOutcome, tuple[SequenceOf[int], ...]]  # and the most probable tokens, if wanted


@dataclass(frozen=True)
class StepResult:
    """What a step did to one planned sequence.

    Attributes:
        outcome: None for a prefill chunk that did not reach the root, or if `error` is set.
        top_token_ids: for each emitted token what the target held most probable in its place, if wanted.
        error: why this sequence failed; the others of the step are not affected.
        features: of the tokens that its rows led to, if wanted: the emitted ones, or those of a prompt.
    """

    planned: PlannedSequence
    outcome: VerifyOutcome | None = None
    top_token_ids: tuple[SequenceOf[int], ...] = ()
    error: Exception | None = None
    features: FeatureRows | None = None

    @property
    def is_last(self) -> bool:
        """Whether the sequence's generation is complete with this."""
        return self.outcome is not None and self.outcome.finish_reason is not None

    @property
    def goes_on(self) -> bool:
        """Whether it emitted tokens and more may follow."""
        return self.outcome is not None and self.outcome.finish_reason is None


@dataclass(frozen=True)
class _Computed:
    """What the forward pass left for one planned sequence.

    Attributes:
        accept: commits its tree.
        features: float32[F, D, H] of its last F rows, if wanted.
    """

    accept: Callable[[], Accepted]
    features: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class ExecutedStep:
    """Results of a step and how long its forward pass took."""

    results: tuple[StepResult, ...]
    forward_ms: float

    @property
    def plan(self) -> StepPlan:
        """What it ran."""
        return StepPlan(tuple([result.planned for result in self.results]))


@dataclass(frozen=True)
class PlainRun:
    """Leave to follow a step with plain ones, which need neither a plan nor the event loop.

    Attributes:
        steps: at most so many; 0 for none.
        may_go_on: asked in the engine's thread before each.
    """

    steps: int
    may_go_on: Callable[[], bool]


NO_PLAIN_RUN = PlainRun(0, lambda: False)


class StepExecutor:
    """Runs steps in the engine's own thread.

    KV of planned rows is reserved before, and committed or rolled back here. Plain steps after it reserve their own.

    Args:
        thread: an executor of one thread, the one in which the runner's model was loaded.
        vocab_size: token ids that exist; logits beyond are padding.

    Attributes:
        vocab_size: token ids that exist.
        feature_shape: of the features it can export; None if the model shows none, as on a GPU.
    """

    def __init__(self, runner: ModelRunner, thread: Executor, vocab_size: int) -> None:
        self._runner = runner
        self._thread = thread
        self.vocab_size = vocab_size
        self._unfound: list[TopTokens] = []
        self._device_model = runner.model if isinstance(runner.model, DeviceModel) else None
        self.feature_shape = None if self._device_model is not None else _feature_shape(runner.model)

    async def run(
        self,
        plan: StepPlan,
        top_tokens_for: frozenset[int],
        meanwhile: Callable[[], None],
        then: PlainRun,
        features_for: frozenset[int] = frozenset(),
    ) -> list[ExecutedStep]:
        """Run a step, and plain ones after it; the event loop goes on meanwhile.

        Args:
            plan: what to run.
            top_tokens_for: seq_ids whose speculators want the most probable tokens.
            meanwhile: called in the event loop once the step is under way: what it does delays nothing.
            then: the plain steps. There are none after a sequence ended or failed, or where KV blocks are short.
            features_for: seq_ids whose speculators want features; empty without a `feature_shape`.
        """

        def run() -> list[ExecutedStep]:
            steps = [self._run(plan, top_tokens_for, features_for)]
            while len(steps) <= then.steps and then.may_go_on() and reserve_next(self._runner.blocks, steps[-1]):
                steps.append(self._run(plain_step_after(steps[-1]), top_tokens_for, features_for))
            return steps

        return await self._in_thread(run, meanwhile)

    @property
    def can_run(self) -> bool:
        """Whether its model decodes steps in a row by itself (`run_on`)."""
        return isinstance(self._runner.model, RunModel)

    async def run_on(self, plan: RunPlan, meanwhile: Callable[[], None]) -> FinishedRun:
        """Run steps in a row; the event loop goes on meanwhile.

        Args:
            meanwhile: as for `run`.
        """

        def run() -> FinishedRun:
            followers = [RunFollower(sequence) for sequence in plan.sequences]
            seq_ids = [sequence.seq_id for sequence in plan.sequences]

            def choose(index: int, token_ids: SequenceOf[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
                return followers[index].choose(token_ids, logits)

            try:
                ran = self._runner.decode(seq_ids, plan.of_each, plan.terms, choose)
            except Exception as error:
                ran = Ran.nothing(plan.of_each, plan.terms, error)
            for follower, each in zip(followers, ran.sequences, strict=True):
                follower.follow(each.token_ids)
            return FinishedRun(plan, ran, tuple(followers))

        return await self._in_thread(run, meanwhile)

    async def _in_thread(self, run: Callable[[], Result], meanwhile: Callable[[], None]) -> Result:
        """Call `run` in the engine's thread, and then `meanwhile` here."""
        loop = asyncio.get_running_loop()
        unfound, self._unfound = self._unfound, []

        def under_way() -> None:
            meanwhile()
            for top_tokens in unfound:
                top_tokens.find()

        def run_there() -> Result:
            # This thread holds the interpreter until the forward pass lets go of it; only then is this called.
            loop.call_soon_threadsafe(under_way)
            return run()

        return await loop.run_in_executor(self._thread, run_there)

    def _run(self, plan: StepPlan, top_tokens_for: frozenset[int], features_for: frozenset[int]) -> ExecutedStep:
        start = time.perf_counter()
        try:
            computed = self._forward(plan.sequences, top_tokens_for, features_for)
        except Exception as error:
            for planned in plan.sequences:
                self._runner.rollback(planned.sequence.seq_id)
            failed = UnavailableError("the forward pass failed")  # none of the sequences' fault: replay them elsewhere
            failed.__cause__ = error
            return ExecutedStep(tuple(StepResult(p, error=failed) for p in plan.sequences), 0.0)
        forward_ms = (time.perf_counter() - start) * 1e3
        results = [self._settle(*each) for each in zip(plan.sequences, computed, strict=True)]
        return ExecutedStep(tuple(results), forward_ms)

    def _forward(
        self, sequences: SequenceOf[PlannedSequence], top_tokens_for: frozenset[int], features_for: frozenset[int]
    ) -> list[_Computed]:
        """The forward pass; for each sequence what accepts its tree, and its rows' features."""

        def accept_tree(planned: PlannedSequence, logits: npt.NDArray[np.float32]) -> Accepted:
            return self._accept(planned, logits, planned.sequence.seq_id in top_tokens_for)

        rows = [_rows(planned, self._runner) for planned in sequences]
        if self._device_model is not None:
            from treeserve_verifier.device_step import forward_on_device  # torch, which int8 on a CPU does without

            commits = forward_on_device(
                self._runner,
                self._device_model,
                sequences,
                rows,
                accept_tree,
                top_tokens=TOP_TOKENS,
                top_tokens_for=top_tokens_for,
                vocab_size=self.vocab_size,
            )
            return [_Computed(commit) for commit in commits]
        if self.feature_shape is None or features_for.isdisjoint(p.sequence.seq_id for p in sequences):
            logits = self._runner.forward(rows)
            return [_Computed(partial(accept_tree, *each)) for each in zip(sequences, logits, strict=True)]
        rows = [
            self._with_features(p, r) if p.sequence.seq_id in features_for else r
            for p, r in zip(sequences, rows, strict=True)
        ]
        states = self._runner.forward_hidden(rows, self.feature_shape.layers)
        return [
            _Computed(partial(accept_tree, planned, state.logits), state.features)
            for planned, state in zip(sequences, states, strict=True)
        ]

    def _with_features(self, planned: PlannedSequence, rows: SequenceRows) -> SequenceRows:
        """The rows, asking for the features of all draft nodes, or of those of a chunk that a drafter may look at."""
        assert self.feature_shape is not None
        unread = len(planned.sequence.tokens) - self._runner.blocks.computed_len(planned.sequence.seq_id)
        first = 0 if planned.chunk == 1 else max(0, unread - self.feature_shape.window_tokens)
        return replace(rows, feature_rows=range(min(first, planned.rows), planned.rows))

    def _settle(self, planned: PlannedSequence, computed: _Computed) -> StepResult:
        sequence = planned.sequence
        if planned.tree is None:
            features = self._features(planned, computed, range(planned.chunk))
            self._runner.commit(sequence.seq_id, range(planned.chunk))
            return StepResult(planned, features=features)
        try:
            outcome, top_token_ids = computed.accept()
        except Exception as error:
            self._runner.rollback(sequence.seq_id)
            return StepResult(planned, error=error)
        kept = range(planned.chunk) if planned.chunk > 1 else outcome.walked_nodes
        features = self._features(planned, computed, kept)
        self._runner.commit(sequence.seq_id, kept)
        return StepResult(planned, outcome, top_token_ids, features=features)

    def _features(self, planned: PlannedSequence, computed: _Computed, walked: SequenceOf[int]) -> FeatureRows | None:
        """Of the tokens that followed the walked rows: the last of them, as many as have features."""
        if computed.features is None:
            return None
        not_asked = planned.rows - len(computed.features)
        rows = [row for row in walked if row >= not_asked]
        if not rows:
            return None
        after = self._runner.blocks.computed_len(planned.sequence.seq_id) + len(walked) + 1
        return FeatureRows.narrowed(after - len(rows), computed.features[[row - not_asked for row in rows]])

    def _accept(self, planned: PlannedSequence, logits: npt.NDArray[np.float32], wants_top_tokens: bool) -> Accepted:
        sequence = planned.sequence
        tree = planned.tree
        assert tree is not None  # nothing is accepted after a chunk that does not reach the root
        acceptance = sequence.submission.limits.acceptance
        outcome = accept(tree, lambda node: logits[node], sequence.sampler, sequence.stops_at, acceptance)
        if not wants_top_tokens:
            return outcome, ()
        top_tokens = tuple([TopTokens(logits[node][: self.vocab_size]) for node in outcome.walked_nodes])
        self._unfound += top_tokens
        return outcome, top_tokens


def reserve_next(blocks: BlockManager, step: ExecutedStep) -> bool:
    """Reserve a position for every sequence of a step, if all of them go on and there is room."""
    seq_ids = [result.planned.sequence.seq_id for result in step.results if result.goes_on]
    if len(seq_ids) < len(step.results) or len(seq_ids) > blocks.free_blocks:
        return False
    for seq_id in seq_ids:
        blocks.reserve(seq_id, 1)
    return True


def plain_step_after(step: ExecutedStep) -> StepPlan:
    """Each sequence's last token alone, after a step after which all of them go on."""
    planned = []
    for result in step.results:
        assert result.outcome is not None
        root = TokenTree.root_only(result.outcome.token_ids[-1])
        planned.append(PlannedSequence(result.planned.sequence, 1, root))
    return StepPlan(tuple(planned))


def _feature_shape(model: Model) -> FeatureShape | None:
    return model.feature_shape if isinstance(model, HiddenModel) and model.feature_shape.layers else None


def _rows(planned: PlannedSequence, runner: ModelRunner) -> SequenceRows:
    seq_id = planned.sequence.seq_id
    if planned.tree is not None and planned.chunk == 1:
        return SequenceRows.from_tree(seq_id, planned.tree)
    computed = runner.blocks.computed_len(seq_id)
    logits_rows: SequenceOf[int] = () if planned.tree is None else (planned.chunk - 1,)
    return SequenceRows.from_chain(seq_id, planned.sequence.tokens[computed : computed + planned.chunk], logits_rows)
