"""Owns every sequence of the verifier: admits, preempts, cancels, and settles what a step produced."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from treeserve_core.errors import OverloadedError, UnavailableError
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.tree import TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.planner import PlannedSequence, StepPlan
from treeserve_verifier.sequence import Emission, Sequence

_VERIFIED_SMOOTHING = 0.3
_CALIBRATION_SMOOTHING = 0.15
_PRIOR_SMOOTHING = 0.02
_FORGIVENESS = 0.01
_RETRY_AFTER_S = 1.0


class Scheduler:
    """Waiting and running sequences, and their KV blocks.

    A sequence waits until a place and blocks for its tokens are free; it then runs until it ends. When the pool runs
    dry, the youngest running sequence gives its blocks back and waits in front: replay makes that invisible, because
    its tokens are recomputed with the same bits and the sampler has no other state.

    Everything here happens between steps: a step in flight owns the sequences of its plan, so cancelling one only
    marks it.
    """

    def __init__(self, config: VerifierConfig, blocks: BlockManager, on_end: Callable[[Sequence], None]) -> None:
        self._config = config
        self._blocks = blocks
        self._on_end = on_end  # called once for each sequence that leaves, however it ends
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._in_step: frozenset[Sequence] = frozenset()
        self._prior = 1.0  # calibration that a fresh sequence starts with: smoothed over all sequences
        self.preemptions = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold KV blocks, oldest first."""
        return tuple(self._running)

    @property
    def free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return self._blocks.free_blocks

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self._running, *self._waiting))

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            OverloadedError: if too many wait already.
        """
        if len(self._waiting) >= self._config.max_waiting:
            raise OverloadedError(f"{len(self._waiting)} sequences wait for KV blocks", _RETRY_AFTER_S)
        sequence.calibration = self._prior
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence: now, or when the step that runs it is settled. Nothing more is emitted for it."""
        sequence.cancelled = True
        if sequence not in self._in_step:
            self._remove(sequence)

    def fail_all(self, reason: str) -> None:
        """End every sequence with UNAVAILABLE: another verifier can replay it."""
        for sequence in list(self):
            self._end(sequence, Emission(sequence.output_len, (), error=UnavailableError(reason)))

    def admit(self) -> list[Sequence]:
        """Let waiting sequences run, in order, while places and blocks last. Returns those that started."""
        admitted: list[Sequence] = []
        while self._waiting and len(self._running) < self._config.max_sequences:
            sequence = self._waiting[0]
            if self._running and self._blocks_for_all(*self._running, sequence) > self._blocks.total_blocks:
                break
            self._waiting.popleft()
            self._blocks.add(sequence.seq_id)
            self._running.append(sequence)
            admitted.append(sequence)
        return admitted

    def uncomputed(self, sequence: Sequence) -> int:
        """Committed tokens of a running sequence without KV, the root included."""
        return len(sequence.tokens) - self._blocks.computed_len(sequence.seq_id)

    def reserve(self, plan: StepPlan) -> StepPlan:
        """Reserve KV for every planned row and mark the sequences as in a step.

        Where blocks are short, draft nodes go first and then the youngest running sequence is preempted. Returns the
        plan that is left.
        """
        kept: list[PlannedSequence] = []
        preempted: set[Sequence] = set()
        for planned in plan.sequences:
            if planned.sequence in preempted:
                continue
            reserved = self._reserve(planned, preempted, {k.sequence for k in kept})
            if reserved is not None:
                kept.append(reserved)
        self._in_step = frozenset(k.sequence for k in kept)
        return StepPlan(tuple(kept))

    def _reserve(
        self, planned: PlannedSequence, preempted: set[Sequence], reserved: set[Sequence]
    ) -> PlannedSequence | None:
        seq_id = planned.sequence.seq_id
        if not self._blocks.can_reserve(seq_id, planned.most_rows) and planned.tree is not None:
            planned = PlannedSequence(planned.sequence, planned.chunk, planned.tree.subtree(()))
        while not self._blocks.can_reserve(seq_id, planned.rows):
            victim = next((s for s in reversed(self._running) if s not in reserved), None)
            if victim is None or victim is planned.sequence:
                self._preempt(planned.sequence)
                preempted.add(planned.sequence)
                return None
            self._preempt(victim)
            preempted.add(victim)
        self._blocks.reserve(seq_id, planned.rows)
        return planned

    def _preempt(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.seq_id)
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def settle(self, planned: PlannedSequence, outcome: VerifyOutcome | None) -> None:
        """Take a planned sequence's result: append its tokens, emit them, end it if it ended."""
        sequence = planned.sequence
        self._in_step -= {sequence}
        if sequence.cancelled:
            self._remove(sequence)
            return
        if outcome is None:  # a prefill chunk that did not reach the root
            return
        offset = sequence.output_len
        sequence.tokens.extend(outcome.token_ids)
        drafted = len(planned.tree) - 1 if planned.tree is not None else 0
        sequence.stats.record(drafted, len(outcome.accepted_nodes))
        self._calibrate(planned, outcome)
        if drafted or planned.untried is not None:
            sequence.verified += _VERIFIED_SMOOTHING * (drafted - sequence.verified)
        emission = Emission(
            offset,
            outcome.token_ids,
            outcome.log_probs,
            outcome.finish_reason,
            (sequence.stop_watch.stopped or "") if sequence.stop_watch is not None else "",
            sequence.stats,
        )
        if outcome.finish_reason is None:
            sequence.emit(emission)
        else:
            self._end(sequence, emission)

    def settle_failed(self, planned: PlannedSequence, error: Exception) -> None:
        """End a planned sequence whose step raised."""
        sequence = planned.sequence
        self._in_step -= {sequence}
        if sequence.cancelled:
            self._remove(sequence)
        else:
            self._end(sequence, Emission(sequence.output_len, (), error=error))

    def _calibrate(self, planned: PlannedSequence, outcome: VerifyOutcome) -> None:
        """Learn how far the drafters' probabilities hold. What is expected counts with the present calibration."""
        sequence, expected, accepted = planned.sequence, planned.expected, len(outcome.accepted_nodes)
        if expected == 0.0:
            # Nothing was tried. Of a tree that was there the emitted token judges the first level; else forgive slowly.
            if planned.untried is None:
                sequence.calibration += _FORGIVENESS * (1.0 - sequence.calibration)
                return
            expected = sequence.calibration * _first_level(planned.untried)
            accepted = int(planned.untried.child(0, outcome.token_ids[0]) is not None)
        ratio = min((accepted + 0.5) / (expected + 0.5), 2.0)  # the halves keep small trees from swinging it
        sequence.calibration *= 1.0 + _CALIBRATION_SMOOTHING * (ratio - 1.0)
        self._prior += _PRIOR_SMOOTHING * (sequence.calibration - self._prior)

    def _end(self, sequence: Sequence, emission: Emission) -> None:
        sequence.emit(emission)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._blocks.free(sequence.seq_id)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            return
        self._on_end(sequence)

    def _blocks_for_all(self, *sequences: Sequence) -> int:
        """Blocks for the tokens of these sequences, and one each to grow into: a fresh one is not preempted at once."""
        return sum(-(-len(s.tokens) // self._config.block_size) + 1 for s in sequences)


def _first_level(tree: TokenTree) -> float:
    """Probability that one of the root's children comes true, as the drafters see it."""
    return sum(math.exp(tree.path_log_probs[child]) for child in tree.children[0])
