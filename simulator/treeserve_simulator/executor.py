"""Steps that take time and compute nothing: texts say which tokens come, and the cost model how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from treeserve_core.outcome import VerifyOutcome
from treeserve_core.tree import TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_simulator.costs import MachineModel, PassRows
from treeserve_simulator.text import Text
from treeserve_verifier.executor import ExecutedStep, PlainRun, StepResult, plain_step_after, reserve_next
from treeserve_verifier.step_plan import PlannedSequence, StepPlan


class SimulatedExecutor:
    """In place of the verifier's `StepExecutor`: the same steps on the same blocks, without an engine.

    Args:
        texts: by request id, what each sequence will say.

    Attributes:
        can_run: no steps in a row: drafts come from a speculator, which runs do not ask.
        vocab_size: of no meaning here.
        feature_shape: it exports no features.
        busy_s: time that steps took in all.
        steps, rows: forward passes so far, and their rows.
    """

    can_run = False
    vocab_size = 0
    feature_shape = None

    def __init__(self, machine: MachineModel, blocks: BlockManager, texts: Mapping[str, Text]) -> None:
        self._machine = machine
        self._blocks = blocks
        self._texts = texts
        self.busy_s = 0.0
        self.steps = 0
        self.rows = 0

    async def run(
        self,
        plan: StepPlan,
        top_tokens_for: frozenset[int],
        meanwhile: Callable[[], None],
        then: PlainRun,
        features_for: frozenset[int] = frozenset(),
    ) -> list[ExecutedStep]:
        """As `StepExecutor.run`: a step and plain ones after it, while the event loop goes on."""
        asyncio.get_running_loop().call_soon(meanwhile)
        steps = [await self._run(plan, self._machine.overheads.turn_ms)]
        while len(steps) <= then.steps and then.may_go_on() and reserve_next(self._blocks, steps[-1]):
            steps.append(await self._run(plain_step_after(steps[-1])))
        return steps

    async def _run(self, plan: StepPlan, turn_ms: float = 0.0) -> ExecutedStep:
        overheads = self._machine.overheads
        forward_ms = self._machine.costs.step_ms([self._rows(planned) for planned in plan.sequences])
        around_s = (turn_ms + overheads.step_ms + overheads.sequence_ms * len(plan.sequences)) / 1e3
        self.busy_s += forward_ms / 1e3 + around_s
        self.steps += 1
        self.rows += plan.rows
        await asyncio.sleep(forward_ms / 1e3 + around_s)
        return ExecutedStep(tuple(self._settle(planned) for planned in plan.sequences), forward_ms)

    def _rows(self, planned: PlannedSequence) -> PassRows:
        logits = 0 if planned.tree is None else len(planned.tree)
        return PassRows(planned.rows, self._blocks.computed_len(planned.sequence.seq_id), logits)

    def _settle(self, planned: PlannedSequence) -> StepResult:
        if planned.tree is None:
            self._commit(planned, range(planned.chunk))
            return StepResult(planned)
        outcome = self._accept(planned, planned.tree)
        self._commit(planned, range(planned.chunk) if planned.chunk > 1 else outcome.walked_nodes)
        return StepResult(planned, outcome)

    def _accept(self, planned: PlannedSequence, tree: TokenTree) -> VerifyOutcome:
        """Replay along the text."""
        sequence = planned.sequence
        text, place = self._texts[sequence.submission.request_id].token_ids, len(sequence.tokens)
        accepted: list[int] = []
        emitted: list[int] = []
        node: int | None = 0
        reason = None
        while node is not None and reason is None:
            token_id = text[place + len(emitted)]
            emitted.append(token_id)
            reason = sequence.sampler.append(token_id)
            node = tree.child(node, token_id)
            if node is not None:
                accepted.append(node)
        return VerifyOutcome(tuple(accepted), tuple(emitted), reason)

    def _commit(self, planned: PlannedSequence, kept: Sequence[int]) -> None:
        seq_id = planned.sequence.seq_id
        if planned.tree is not None and planned.chunk == 1:
            rows: Sequence[int] = planned.tree.token_ids
        else:
            start = self._blocks.computed_len(seq_id)
            rows = planned.sequence.tokens[start : start + planned.chunk]
        self._blocks.commit(seq_id, kept, [rows[node] for node in kept] if self._blocks.shares(seq_id) else ())
