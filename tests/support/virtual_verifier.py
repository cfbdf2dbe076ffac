"""A verifier's scheduler and planner on a clock of their own: steps take what the cost model says and emit token 5."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from support.sequences import make_config, make_sequence
from treeserve_core.outcome import FinishReason, VerifyOutcome
from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_core.tree import TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Sequence as Decoding
from treeserve_verifier.step_plan import PlannedSequence, StepPlan

# As measured for SmolLM2-135M in int8 on one thread, rounded.
COST = {1: 5.0, 4: 5.5, 8: 7.0, 16: 10.0, 32: 17.0, 64: 33.0}
PREFILL_ROW_MS, ATTEND_MS = 0.3, 0.00033

TreeOf = Callable[[Decoding], TokenTree | None]


class VirtualVerifier:
    """Steps one after another; `now` goes on by what each takes.

    Args:
        tree_of: the tree that waits for a sequence. Nothing of it is accepted.
        config: fields that differ from those of a small verifier.

    Attributes:
        emitted: for each sequence the times at which it emitted tokens.
        plans: all steps so far.
        fullest: most blocks that were held at once.
    """

    def __init__(self, *, tree_of: TreeOf = lambda sequence: None, **config: Any) -> None:
        defaults = {"kv_tokens": 32768, "max_context_tokens": 8192, "block_size": 16, "step_rows": 256}
        self.config = make_config(**{**defaults, "prefill_rows": 128, **config})
        self.now = 0.0
        self.cost = CostModel(COST, PREFILL_ROW_MS, ATTEND_MS)
        self.blocks = BlockManager(
            self.config.kv_tokens // self.config.block_size, self.config.block_size, clock=lambda: self.now
        )
        self.planner = StepPlanner(self.config, self.cost)
        self.ended: list[Decoding] = []
        self.scheduler = Scheduler(self.config, self.blocks, self.ended.append, lambda: self.now)
        self.emitted: dict[Decoding, list[float]] = {}
        self.plans: list[StepPlan] = []
        self.fullest = 0
        self._tree_of = tree_of
        self._tenants = itertools.count()

    def submit(
        self,
        prompt_len: int,
        max_tokens: int,
        service_class: ServiceClass = ServiceClass.STANDARD,
        waited_ms: float = 0.0,
        **limits: Any,
    ) -> Decoding:
        """Queue a sequence that shares no KV with others."""
        sequence = make_sequence(
            [7] * prompt_len,
            max_tokens,
            SequenceLimits(service_class, **limits),
            tenant=f"alone-{next(self._tenants)}",
            waited_ms=waited_ms,
        )
        self.emitted[sequence] = []
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> StepPlan:
        """One step; its plan."""
        self.scheduler.admit()
        plan = self.scheduler.reserve(self.planner.plan(self.scheduler.candidates(self._tree_of)))
        self.fullest = max(self.fullest, self.blocks.total_blocks - self.blocks.free_blocks)
        prefill_ms = sum(self.cost.prefill_ms(p.prefill_rows, p.context) for p in plan.sequences if p.prefill_rows)
        self.now += (self.cost.step_ms(plan.rows - plan.prefill_rows) + prefill_ms) / 1e3
        for planned in plan.sequences:
            self._settle(planned)
        self.plans.append(plan)
        self.blocks.check_integrity()
        return plan

    def run(self, until: Callable[[], bool], most_steps: int = 100_000) -> None:
        """Step until something is so."""
        for _ in range(most_steps):
            if until():
                return
            self.step()
        raise AssertionError(f"still not so after {most_steps} steps")

    def run_all(self) -> None:
        """Step until nothing is left."""
        self.run(lambda: len(self.scheduler) == 0)

    def gaps_ms(self, sequence: Decoding) -> list[float]:
        """Times between emissions of a sequence."""
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.emitted[sequence])]

    def _settle(self, planned: PlannedSequence) -> None:
        sequence = planned.sequence
        rows: Sequence[int] = sequence.tokens[planned.context :][: planned.chunk]
        self.blocks.commit(sequence.seq_id, range(planned.chunk), rows)
        if planned.tree is None:
            self.scheduler.settle(planned, None)
            return
        reason = FinishReason.LENGTH if len(sequence.tokens) + 1 == sequence.max_len else None
        self.emitted[sequence].append(self.now)
        self.scheduler.settle(planned, VerifyOutcome((), (5,), reason))
