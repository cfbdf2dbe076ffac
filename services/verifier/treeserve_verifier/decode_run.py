"""Steps in a row that nobody plans: what a run may do is settled before it, and what it did is learned after it.

Where a step takes a few milliseconds, planning it, drafting for it and settling it in Python takes a good part of that.
A model that can (`RunModel`) decodes on by itself instead, with the drafter of this process, as long as nothing happens
that the event loop should look at. The tokens are the same, and so is what a step drafts and verifies: the native code
follows `planner`, `selection` and `calibration`, and tests compare the two.

Where there are prompts to compute, the first step of a run is planned, and those after it are like it: the same
sequences decode, and as many rows of the same prompts are computed, until the first of these prompts is at its end.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_engine.accept import is_replayed
from treeserve_kernels.cpu.decode_run import Ran, RanSequence, RunSequence, RunTerms
from treeserve_kernels.cpu.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from treeserve_verifier.colocated import ColocatedOutbox
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.seat import Seat
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import Candidate, StepPlan
from treeserve_verifier.top_tokens import TOP_TOKENS

_MOST_STEPS = 64
_MARGIN = 1.25  # tokens may come a little faster than so far


@dataclass(frozen=True)
class RunPlan:
    """A run to come. KV is reserved for it.

    Attributes:
        sequences: all that run, the most urgent first.
        seats: of those that are drafted for.
        of_each, terms: for the model.
    """

    sequences: tuple[Sequence, ...]
    seats: dict[Sequence, Seat]
    of_each: tuple[RunSequence, ...]
    terms: RunTerms


class RunFollower:
    """Keeps a sequence's sampler up with a run, and chooses the tokens that take more than logits and noise.

    Attributes:
        log_probs: one entry per token if the request asked for them.
        error: why a token could not be chosen.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._followed = 0  # tokens of the run that the sampler knows
        self.log_probs: list[PositionLogProbs] = []
        self.error: Exception | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended, if it did."""
        return self._sequence.sampler.finish_reason

    def follow(self, token_ids: SequenceOf[int]) -> None:
        """The run emitted these so far."""
        for token_id in token_ids[self._followed :]:
            self._append(token_id)

    def choose(self, token_ids: SequenceOf[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
        """The token after these, and whether it ends the sequence; -1 if that is not possible (`error`)."""
        sampler = self._sequence.sampler
        try:
            self.follow(token_ids)
            token_id = sampler.next_token(logits)
            if sampler.wants_log_probs:
                self.log_probs.append(sampler.log_probs(logits, token_id))
            self._append(token_id)
        except Exception as error:
            self.error = error
            return -1, False
        return token_id, sampler.finish_reason is not None

    def _append(self, token_id: int) -> None:
        self._followed += 1
        self._sequence.sampler.append(token_id, stopped=self._sequence.stops_at(token_id))


@dataclass(frozen=True)
class FinishedRun:
    """A run, what it did to each sequence, and who followed it there, both in the order of its plan."""

    plan: RunPlan
    ran: Ran
    followers: tuple[RunFollower, ...]


class RunEngine(Protocol):
    """What runs them: the step executor."""

    @property
    def can_run(self) -> bool:
        """Whether its model decodes steps in a row by itself."""

    @property
    def vocab_size(self) -> int:
        """Token ids that exist."""


class RunPlanner:
    """Plans runs. On the event loop only.

    Args:
        engine: what will run them.
        clock: seconds, monotonic.
        run_s: a run takes no longer; 0 for no runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        desk: DraftDesk,
        planner: StepPlanner,
        engine: RunEngine,
        colocated: ColocatedOutbox | None,
        clock: Callable[[], float],
        run_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._desk = desk
        self._planner = planner
        self._can_run = engine.can_run and run_s > 0.0
        self._vocab_size = engine.vocab_size
        self._colocated = colocated
        self._clock = clock
        self._run_s = run_s

    def may_run(self) -> bool:
        """Whether all sequences are of the kind that can, and nobody but a drafter of this process drafts for them."""
        running = self._scheduler.running
        if not self._can_run or not 0 < len(running) <= self._planner.step_rows:
            return False
        drafts = self._colocated is not None and self._colocated.can_run
        return all(map(self._may_run, running)) and not self._desk.expects_trees(running, drafts)

    def plan(self, stop: ctypes.c_int32) -> RunPlan | None:
        """A run of the sequences that run, if there is room for its KV. Only where `may_run`.

        Args:
            stop: no further step of the run begins once it is not 0.
        """
        candidates = self._scheduler.candidates(_no_tree)
        step = self._planner.plan(candidates) if any(map(_reads, candidates)) else StepPlan(())
        rows = {planned.sequence: planned.rows for planned in step.sequences}
        candidates = [c for c in candidates if c.sequence in rows or not rows]
        reading = {c.sequence: rows[c.sequence] for c in candidates if _reads(c)}
        wanted = {c.sequence: self._positions(c) for c in candidates}
        if not candidates or not self._scheduler.begin_run(wanted, reading, step.put_off):
            return None
        # The next step is to be planned if prompts get nothing in this one, or somebody who is put off is due after it.
        goes_on = step.holds_ms > 0.0 and (bool(reading) or not rows)
        decoding = [sequence for sequence in wanted if sequence not in reading]
        seats, calls = self._desk.before_run(decoding), None
        if seats and self._colocated is not None:
            calls = self._colocated.begin_run([seat.handle for seat in seats.values()])
        wants_top = self._colocated is not None and self._colocated.wants_top_tokens
        terms = RunTerms(
            vocab_size=self._vocab_size,
            step_rows=self._planner.step_rows,
            cost_table=self._planner.cost_table,
            unread_rows=sum(reading.values()),
            node_price=self._planner.prices(len(decoding)).node,
            drafter=calls,
            top_tokens=TOP_TOKENS if wants_top else 0,
            max_steps=_MOST_STEPS if goes_on else 1,
            max_s=min(self._run_s, step.holds_ms / 1e3) if goes_on else self._run_s,
            prior=self._scheduler.calibrator.prior,
            stop=stop,
        )
        of_each = tuple([self._described(candidate, seats.get(candidate.sequence)) for candidate in candidates])
        return RunPlan(tuple(wanted), seats, of_each, terms)

    def _may_run(self, sequence: Sequence) -> bool:
        """Whether its tokens are replayed, no grammar has trees of its own for it, and nobody wants features of it."""
        return (
            not sequence.sampler.is_constrained
            and is_replayed(sequence.sampler, sequence.submission.limits.acceptance)
            and not self._desk.wants_features(sequence)
        )

    def _positions(self, candidate: Candidate) -> int:
        """KV positions to reserve: the run ends where they do."""
        if _reads(candidate):
            return candidate.uncomputed
        sequence, running = candidate.sequence, len(self._scheduler.running)
        steps = min(_MOST_STEPS, 1 + math.ceil(self._run_s / (running * self._planner.prices(running).token_s)))
        emitted = math.ceil(_MARGIN * max(1.0, sequence.stats.acceptance_length) * steps)
        return min(sequence.max_len - len(sequence.tokens), emitted + self._planner.draft_budget(sequence, running))

    def _described(self, candidate: Candidate, seat: Seat | None) -> RunSequence:
        sequence = candidate.sequence
        sampling, tpot_ms = sequence.submission.sampling, sequence.promise.tpot_ms
        tokens_left, asks = sequence.max_len - len(sequence.tokens), _asks(sequence)
        return RunSequence(
            len(sequence.tokens),
            sequence.tokens[-1],
            tokens_left,
            sequence.sampler.end_ids,
            sequence.tokens[-candidate.uncomputed :] if _reads(candidate) else (),
            asks,
            0.0 if asks or sequence.sampler.is_greedy else sampling.temperature,
            sampling.seed,
            None if seat is None else seat.handle,
            0 if seat is None else self._planner.most_nodes(sequence, len(self._scheduler.running)),
            candidate.slack_ms,
            math.inf if tpot_ms is None else tpot_ms * TPOT_SHARE,
            sequence.promise.reserve_ms(tokens_left),
            sequence.calibration,
            sequence.verified,
        )


def _no_tree(sequence: Sequence) -> None:
    """Runs draft for themselves."""


def _reads(candidate: Candidate) -> bool:
    """Whether its first token, or the first one after it was paused, is still to come."""
    return candidate.uncomputed > 1 or candidate.sequence.promise.first_at is None


def _asks(sequence: Sequence) -> bool:
    """Whether its tokens take more than logits and noise, or may end it in more ways than by their ids."""
    sampler, temperature = sequence.sampler, sequence.submission.sampling.temperature
    is_drawn = not sampler.is_greedy and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
    return is_drawn or not sampler.is_plain or sequence.stop_watch is not None


def stats_of(ran: RanSequence) -> SpeculationStats:
    """What a run counts for a sequence."""
    accepted = [record.accepted for record in ran.records if record.emitted]
    return SpeculationStats(
        len(accepted),
        sum(record.verified for record in ran.records),
        sum(accepted),
        [sum(each > depth for each in accepted) for depth in range(max(accepted, default=0))],
    )
