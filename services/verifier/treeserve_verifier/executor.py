"""Runs a step plan on the engine: one forward pass, then replay acceptance and KV compaction for each sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import UnavailableError
from treeserve_core.outcome import VerifyOutcome
from treeserve_engine.accept import accept
from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_verifier.planner import PlannedSequence, StepPlan

_TOP_TOKENS = 8


@dataclass(frozen=True)
class StepResult:
    """What a step did to one planned sequence.

    Attributes:
        outcome: None for a prefill chunk that did not reach the root, or if `error` is set.
        top_token_ids: for each emitted token what the target held most probable in its place, if wanted.
        error: why this sequence failed; the others of the step are not affected.
    """

    planned: PlannedSequence
    outcome: VerifyOutcome | None = None
    top_token_ids: tuple[tuple[int, ...], ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class ExecutedStep:
    """Results of a step and how long its forward pass took."""

    results: tuple[StepResult, ...]
    forward_ms: float


class StepExecutor:
    """Runs steps in the engine's own thread. KV of planned rows is reserved before, and committed or rolled back here.

    Args:
        thread: an executor of one thread, the one in which the runner's model was loaded.
    """

    def __init__(self, runner: ModelRunner, thread: Executor) -> None:
        self._runner = runner
        self._thread = thread

    async def run(self, plan: StepPlan, top_tokens_for: frozenset[int]) -> ExecutedStep:
        """Run one step; the event loop goes on meanwhile.

        Args:
            plan: what to run.
            top_tokens_for: seq_ids whose speculators want the most probable tokens.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, plan, top_tokens_for)

    def _run(self, plan: StepPlan, top_tokens_for: frozenset[int]) -> ExecutedStep:
        start = time.perf_counter()
        try:
            logits = self._runner.forward([_rows(planned, self._runner) for planned in plan.sequences])
        except Exception as error:
            for planned in plan.sequences:
                self._runner.rollback(planned.sequence.seq_id)
            failed = UnavailableError("the forward pass failed")  # none of the sequences' fault: replay them elsewhere
            failed.__cause__ = error
            return ExecutedStep(tuple(StepResult(p, error=failed) for p in plan.sequences), 0.0)
        forward_ms = (time.perf_counter() - start) * 1e3
        results = [
            self._accept(planned, rows, planned.sequence.seq_id in top_tokens_for)
            for planned, rows in zip(plan.sequences, logits, strict=True)
        ]
        return ExecutedStep(tuple(results), forward_ms)

    def _accept(self, planned: PlannedSequence, logits: npt.NDArray[np.float32], wants_top_tokens: bool) -> StepResult:
        sequence, tree = planned.sequence, planned.tree
        if tree is None:
            self._runner.commit(sequence.seq_id, range(planned.chunk))
            return StepResult(planned)
        try:
            outcome = accept(tree, lambda node: logits[node], sequence.sampler, sequence.stops_at)
        except Exception as error:
            self._runner.rollback(sequence.seq_id)
            return StepResult(planned, error=error)
        kept = range(planned.chunk) if planned.chunk > 1 else (0, *outcome.accepted_nodes)
        self._runner.commit(sequence.seq_id, kept)
        top: tuple[tuple[int, ...], ...] = ()
        if wants_top_tokens:
            path = (0, *outcome.accepted_nodes)[: len(outcome.token_ids)]
            top = tuple(_most_probable(logits[node]) for node in path)
        return StepResult(planned, outcome, top)


def forward_ms(runner: ModelRunner, rows: int) -> float:
    """Duration of a forward pass over a fresh chain of `rows` tokens with logits for all of them, milliseconds."""
    blocks, seq_id = runner.blocks, -1
    blocks.add(seq_id)
    blocks.reserve(seq_id, rows)
    start = time.perf_counter()
    runner.forward([SequenceRows.from_chain(seq_id, [0] * rows, range(rows))])
    elapsed = time.perf_counter() - start
    blocks.rollback(seq_id)
    blocks.free(seq_id)
    return elapsed * 1e3


def _rows(planned: PlannedSequence, runner: ModelRunner) -> SequenceRows:
    seq_id = planned.sequence.seq_id
    if planned.tree is not None and planned.chunk == 1:
        return SequenceRows.from_tree(seq_id, planned.tree)
    computed = runner.blocks.computed_len(seq_id)
    logits_rows: SequenceOf[int] = () if planned.tree is None else (planned.chunk - 1,)
    return SequenceRows.from_chain(seq_id, planned.sequence.tokens[computed : computed + planned.chunk], logits_rows)


def _most_probable(logits: npt.NDArray[np.float32]) -> tuple[int, ...]:
    top = np.argpartition(logits, -_TOP_TOKENS)[-_TOP_TOKENS:]
    return tuple(int(i) for i in top[np.argsort(-logits[top], kind="stable")])
