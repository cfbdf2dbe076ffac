"""Owns every sequence of the verifier: admits, pauses, preempts, cancels, and settles what a step produced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from treeserve_core.errors import HandedBackError, OverloadedError
from treeserve_core.outcome import SpeculationStats, VerifyOutcome
from treeserve_core.sampling import ServiceClass
from treeserve_core.tree import TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.calibration import Calibrator
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.kv_room import KvRoom
from treeserve_verifier.precedence import Ranking
from treeserve_verifier.sequence import Emission, Sequence
from treeserve_verifier.step_plan import Candidate, PlannedSequence, StepPlan

_RETRY_AFTER_S = 1.0


class Scheduler:
    """Waiting and running sequences, and their KV blocks.

    A sequence waits until a place and blocks for its tokens are free, and runs until it ends or somebody else needs
    its place: the most urgent comes first (`Ranking`). An urgent one that finds no room pauses those less urgent
    that may be paused. Where the pool runs dry, the least urgent running sequence is preempted, whether it may be
    paused or not. Replay makes both invisible: tokens whose KV is gone are recomputed with the same bits, and the
    sampler has no other state.

    Everything here happens between steps: a step in flight owns the sequences of its plan, so cancelling one only
    marks it.

    Args:
        on_end: called once for each sequence that leaves, however it ends.
        clock: seconds, monotonic.
        token_ms, compute_last: as for `KvRoom`.

    Attributes:
        calibrator: learns how far drafters' probabilities hold.
        pauses: sequences paused for more urgent ones.
        preemptions: sequences that gave their blocks back because the pool ran dry.
    """

    def __init__(
        self,
        config: VerifierConfig,
        blocks: BlockManager,
        on_end: Callable[[Sequence], None],
        clock: Callable[[], float],
        token_ms: Callable[[], float] = lambda: math.inf,
        compute_last: Callable[[Sequence], int] = lambda sequence: 1,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._room = KvRoom(blocks, config.session_lease_s, token_ms, compute_last)
        self._on_end = on_end
        self._clock = clock
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._in_step: frozenset[Sequence] = frozenset()
        self._ahead = 0  # blocks that a run took for what its sequences may emit
        self._ranking = Ranking(config.ageing_s)
        self.calibrator = Calibrator()
        self._gaps_s: list[float] = []
        self.pauses = 0
        self.preemptions = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold KV blocks, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that do not run yet, or are paused."""
        return tuple(self._waiting)

    @property
    def preemptible(self) -> int:
        """Running sequences that a more urgent one may pause."""
        return sum(s.submission.limits.preemptible for s in self._running)

    @property
    def oldest_waiting_s(self) -> float:
        """How long the one that has waited longest waits; 0 if none does."""
        now = self._clock()
        return max((now - s.wait.since for s in self._waiting if s.wait.since is not None), default=0.0)

    @property
    def capacity(self) -> int:
        """Sequences that can run at once: all places, or as many as KV is there for if all are like those that run."""
        places = self._config.max_sequences + self._config.reserved_sequences
        held = self._blocks.total_blocks - self.free_blocks
        fitting = len(self._running) * self._blocks.total_blocks // held if held else places
        return min(places, max(fitting, 1))

    @property
    def free_blocks(self) -> int:
        """KV blocks that no sequence holds; what a run of steps took ahead is taken for free."""
        return self._blocks.free_blocks + self._ahead

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
        now = self._clock()
        sequence.promise.asked_at = now - sequence.submission.waited_ms / 1e3
        self.calibrator.begin(sequence)
        self._wait(sequence, now)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence: now, or when the step that runs it is settled. Nothing more is emitted for it."""
        sequence.cancelled = True
        if sequence not in self._in_step:
            self._remove(sequence)

    def fail_all(self, reason: str) -> None:
        """Hand every sequence back: another verifier can replay it."""
        for sequence in list(self):
            self._end(sequence, Emission(sequence.output_len, (), error=HandedBackError(reason)))

    def admit(self) -> list[Sequence]:
        """Let waiting sequences run, the most urgent first, while there is room. Returns those that started.

        For want of a place the next in line may go ahead, because some places are kept for the most urgent; for want
        of blocks nobody does, or long prompts would starve.
        """
        now = self._clock()
        admitted: list[Sequence] = []
        pausable = self._ranking.pausable(self._running, now) if self._waiting else []
        for sequence in self._ranking.in_order(self._waiting, now):
            standing, places = self._ranking.standing(sequence, now), self._free_places(sequence)
            victims = [other for other_standing, other in pausable if other_standing > standing]
            if places + len(victims) < 1:
                continue
            count = max(0, 1 - places)
            while not self._fits(sequence, victims[:count]):
                if count == len(victims):
                    return admitted
                count += 1
            for victim in victims[:count]:
                self._pause(victim, now)
            pausable = [pair for pair in pausable if pair[1] not in victims[:count]]
            self.pauses += count
            self._start(sequence)
            admitted.append(sequence)
        return admitted

    def candidates(self, tree_of: Callable[[Sequence], TokenTree | None]) -> list[Candidate]:
        """Running sequences as the planner takes them, the most urgent first.

        Args:
            tree_of: the tree that waits for a sequence which decodes.
        """
        now = self._clock()
        found = []
        for sequence in self._ranking.in_order(self._running, now):
            uncomputed = self.uncomputed(sequence)
            tree = tree_of(sequence) if uncomputed == 1 else None
            due_at, last_at = sequence.promise.due_at, sequence.promise.last_at
            slack_ms = math.inf if due_at is None else 1e3 * (due_at - now)
            silent_ms = 0.0 if last_at is None else 1e3 * (now - last_at)
            found.append(Candidate(sequence, uncomputed, tree, slack_ms, silent_ms))
        return found

    def uncomputed(self, sequence: Sequence) -> int:
        """Committed tokens of a running sequence without KV, the root included."""
        return len(sequence.tokens) - self._blocks.computed_len(sequence.seq_id)

    def reserve(self, plan: StepPlan) -> StepPlan:
        """Reserve KV for every planned row, for the most urgent first, and mark the sequences as in a step.

        Where blocks are short, draft nodes go first and then the least urgent running sequence is preempted. Returns
        the plan that is left.
        """
        now = self._clock()
        kept: dict[Sequence, PlannedSequence] = {}
        for planned in sorted(plan.sequences, key=lambda p: self._ranking.precedence(p.sequence, now)):
            if planned.sequence in self._running:  # else it was preempted for one before
                reserved = self._reserve(planned, kept, now)
                if reserved is not None:
                    kept[planned.sequence] = reserved
        self._enter_step(frozenset(kept), plan.put_off, now)
        return StepPlan(tuple(kept[p.sequence] for p in plan.sequences if p.sequence in kept), plan.put_off)

    def begin_run(
        self, wanted: Mapping[Sequence, int], needed: Mapping[Sequence, int], put_off: frozenset[Sequence]
    ) -> bool:
        """Reserve KV for steps in a row, and mark the sequences as in a step.

        Args:
            wanted: KV positions that each of them should have, the most urgent first.
            needed: as for `BlockManager.reserve_ahead`.
            put_off: as in a plan.

        Returns:
            False if blocks are short; nothing has changed then.
        """
        taken = self._blocks.reserve_ahead(
            {sequence.seq_id: positions for sequence, positions in wanted.items()},
            {sequence.seq_id: positions for sequence, positions in needed.items()},
        )
        if taken is None:
            return False
        self._ahead = taken
        self._enter_step(frozenset(wanted), put_off, self._clock())
        return True

    def _enter_step(self, sequences: frozenset[Sequence], put_off: frozenset[Sequence], now: float) -> None:
        self._in_step = sequences
        for sequence in self._running:
            if sequence in sequences or sequence in put_off:
                sequence.wait.end(now)
            else:
                sequence.wait.begin(now)

    def settle_run(
        self, sequence: Sequence, outcome: VerifyOutcome, stats: SpeculationStats, error: Exception | None
    ) -> bool:
        """Take what a run did to a sequence, as `settle` and `settle_failed` do. False if it goes on no more."""
        self._in_step -= {sequence}
        self._ahead = 0
        if sequence.cancelled:
            self._remove(sequence)
            return False
        if outcome.token_ids:
            offset = sequence.output_len
            sequence.tokens.extend(outcome.token_ids)
            sequence.stats.add(stats)
            self._leave(sequence, offset, outcome)
        if error is not None:
            self._end(sequence, Emission(sequence.output_len, (), error=error))
        return error is None and outcome.finish_reason is None

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
        self.calibrator.learn(planned, outcome)
        self._leave(sequence, offset, outcome)

    def _leave(self, sequence: Sequence, offset: int, outcome: VerifyOutcome) -> None:
        """Emit tokens that were committed."""
        self._keep_time(sequence, len(outcome.token_ids))
        emission = Emission(
            offset,
            outcome.token_ids,
            outcome.log_probs,
            outcome.finish_reason,
            (sequence.stop_watch.stopped or "") if sequence.stop_watch is not None else "",
            sequence.stats,
            cached_tokens=sequence.cached_tokens or 0,
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

    def take_gaps_s(self) -> list[float]:
        """Gaps between emissions of a sequence since the last call. What leaves together has none."""
        gaps_s, self._gaps_s = self._gaps_s, []
        return gaps_s

    def _keep_time(self, sequence: Sequence, count: int) -> None:
        now, last_at = self._clock(), sequence.promise.last_at
        if last_at is not None and now > last_at:
            self._gaps_s.append(now - last_at)
        sequence.promise.emitted(count, now)

    def _reserve(
        self, planned: PlannedSequence, reserved: dict[Sequence, PlannedSequence], now: float
    ) -> PlannedSequence | None:
        seq_id = planned.sequence.seq_id
        if not self._blocks.can_reserve(seq_id, planned.most_rows) and planned.tree is not None:
            planned = planned.without_nodes()
        while not self._blocks.can_reserve(seq_id, planned.rows):
            victim = self._ranking.in_order((s for s in self._running if s not in reserved), now)[-1]
            self._pause(victim, now)
            self.preemptions += 1
            if victim is planned.sequence:
                return None
        self._blocks.reserve(seq_id, planned.rows)
        return planned

    def _free_places(self, sequence: Sequence) -> int:
        """Places that it could take. Realtime sequences fill those that are kept for them first."""
        most, reserved = self._config.max_sequences, self._config.reserved_sequences
        if _is_realtime(sequence):
            return most + reserved - len(self._running)
        return most + min(reserved, sum(map(_is_realtime, self._running))) - len(self._running)

    def _fits(self, sequence: Sequence, paused: list[Sequence]) -> bool:
        """Whether there are blocks for it. Alone anything fits that was let in."""
        return len(paused) == len(self._running) or self._room.fits(sequence, self._running, paused)

    def _start(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._room.enter(sequence)
        self._running.append(sequence)

    def _pause(self, sequence: Sequence, now: float) -> None:
        self._room.pause(sequence)
        self._running.remove(sequence)
        self._wait(sequence, now)

    def _wait(self, sequence: Sequence, now: float) -> None:
        sequence.wait.begin(now)
        self._waiting.append(sequence)

    def _end(self, sequence: Sequence, emission: Emission) -> None:
        sequence.emit(emission)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._room.leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._room.forget(sequence)
        else:
            return
        self._on_end(sequence)


def _is_realtime(sequence: Sequence) -> bool:
    return sequence.submission.limits.service_class is ServiceClass.REALTIME
