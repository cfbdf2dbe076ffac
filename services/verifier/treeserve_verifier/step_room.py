"""Fills a step beside the sequences that must decode in it: prompts, and sequences that have time to spare."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from treeserve_core.sampling import ServiceClass
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.selection import Selection, is_lost
from treeserve_verifier.step_plan import Candidate, PlannedSequence

_LEAST_PREFILL_ROWS = 16  # of a step, as far as the gap allows, whatever those who decode were promised
_LEAST_BESIDE_REALTIME = 8  # of them, where more would make a realtime sequence late
_LONGEST = 2.0  # where steps are long without prompts: these take half of the time at most, and can have that
STEPS = 1.5  # who can wait for so many steps may be left out of one: the next may be longer


class Patience:
    """How long decoding sequences can wait for their next token.

    Until it is due, but no longer than the longest gap after the last one. Whoever was promised nothing, or cannot be
    in time any more, can wait as long as the gap.

    Attributes:
        max_gap_ms: the longest gap between two tokens.
    """

    def __init__(self, decoding: SequenceOf[Candidate], cost: CostModel, max_gap_ms: float) -> None:
        self._cost = cost
        self.max_gap_ms = max_gap_ms
        self._step_ms = cost.step_ms(len(decoding)) if decoding else 0.0
        self._decoding = decoding

    def of(self, candidate: Candidate) -> float:
        """Milliseconds."""
        until_gap_ms, promise = self.until_gap_ms(candidate), candidate.sequence.promise
        if promise.tpot_ms is None:
            return until_gap_ms
        tokens_left = candidate.sequence.max_len - len(candidate.sequence.tokens)
        slack_ms = candidate.slack_ms + promise.reserve_ms(tokens_left)
        if is_lost(slack_ms, TPOT_SHARE * promise.tpot_ms, tokens_left, self._step_ms):
            return until_gap_ms
        return min(candidate.slack_ms, until_gap_ms)

    def until_gap_ms(self, candidate: Candidate) -> float:
        """What is left of the longest gap."""
        return self.max_gap_ms - candidate.silent_ms

    def who_can_wait_for(self, prompts: SequenceOf[Candidate]) -> list[Candidate]:
        """Those that could be left out of a step full of these prompts, the first to be due first.

        None of a more urgent class than all prompts.
        """
        urgency = min(c.service_class for c in prompts)
        least_ms = self._cost.step_ms(1) + self._cost.prefill_ms(_LEAST_PREFILL_ROWS, 0)
        ends = (self.of(c) for c in self._decoding if c.service_class <= urgency)
        step_ms = min((end for end in ends if end >= least_ms), default=self._alone_ms(prompts, urgency))
        # Steps beside realtime sequences should take no longer than their tokens may, as long as these can be in time.
        held_to = (c for c in self._decoding if is_realtime(c) and self.of(c) < self.until_gap_ms(c))
        step_ms = min([step_ms, *map(self._interval_ms, held_to)])
        in_order = sorted(self._decoding, key=self.of)
        # As many go on as it takes on average: else all who waited would come at once.
        needed = math.ceil(sum(min(1.0, step_ms / self._interval_ms(c)) for c in in_order))
        return [c for c in in_order[needed:] if c.service_class >= urgency and self.of(c) > STEPS * step_ms]

    def _alone_ms(self, prompts: SequenceOf[Candidate], urgency: ServiceClass) -> float:
        """What the most urgent prompts take by themselves, the longest gap at most."""
        urgent = (c for c in prompts if c.service_class == urgency)
        prefill_ms = sum(self._cost.prefill_ms(c.uncomputed, c.context) for c in urgent)
        return min(self._cost.step_ms(1) + prefill_ms, self.max_gap_ms)

    def _interval_ms(self, candidate: Candidate) -> float:
        tpot_ms = candidate.sequence.promise.tpot_ms
        return self.max_gap_ms if tpot_ms is None else min(self.max_gap_ms, TPOT_SHARE * tpot_ms)


class StepRoom:
    """What can go into a step beside roots and draft nodes that are in it, without making anybody late.

    Beside decoding sequences, prompts lengthen a step to the longest gap at most, or to twice what it takes without, if
    that is more; and, but for a few rows, no further than keeps sequences of the prompt's own class and of more urgent
    ones in time. A sequence that has time to spare goes before a prompt if its token is due before that prompt must be
    begun, and after all prompts otherwise; where there is no room for it, it is left out.

    A realtime prompt is begun at once. Of what comes behind it, sequences that have time to spare are left out, and
    other prompts get as few rows together.

    Args:
        max_rows: of the step.
        prefill_rows: most rows of prompts.
        selection: what is in it.
        impatient: the sequences of the selection, in its order.

    Attributes:
        step_ms: what the step takes with what was put into it so far.
    """

    def __init__(
        self,
        max_rows: int,
        prefill_rows: int,
        cost: CostModel,
        selection: Selection,
        impatient: SequenceOf[Candidate],
        patience: Patience,
    ) -> None:
        self._cost = cost
        self._patience = patience
        self._rows = selection.rows
        self.step_ms = selection.step_ms
        self._left = max_rows - selection.rows
        self._prefill_left = prefill_rows
        self._least = _LEAST_PREFILL_ROWS
        self._behind_left = max_rows  # for prompts behind a realtime one
        gaps = (patience.until_gap_ms(c) for c in impatient)
        self._longest_ms = max(min(gaps, default=math.inf), _LONGEST * self.step_ms)
        self._ends = [(c.service_class, selection.latest_end(i, self.step_ms)) for i, c in enumerate(impatient)]

    def fill(self, prompts: SequenceOf[Candidate], patient: SequenceOf[Candidate]) -> Iterator[PlannedSequence]:
        """Chunks of prompts and further roots; prompts in order of precedence, the others as `Patience` has them."""
        for candidate in patient:
            self._longest_ms = min(self._longest_ms, self._patience.until_gap_ms(candidate))
            self._ends.append((candidate.service_class, self._patience.of(candidate) / STEPS))
        pending = list(reversed(patient))
        for prompt in prompts:
            begin_ms = self._latest_begin_ms(prompt)
            while pending and self._patience.of(pending[-1]) < begin_ms:
                yield from self._root(pending.pop())
            yield from self._chunk(prompt)
            if is_realtime(prompt):
                self._behind_left = min(self._behind_left, _LEAST_PREFILL_ROWS)
                pending = [candidate for candidate in pending if is_realtime(candidate)]
        while pending:
            yield from self._root(pending.pop())

    def _latest_begin_ms(self, prompt: Candidate) -> float:
        """When the rest of a prompt must be begun to be in time; if it is late already, as any token must come."""
        if is_realtime(prompt):
            return 0.0
        if prompt.slack_ms < 0.0:
            return self._patience.max_gap_ms
        return prompt.slack_ms - self._cost.prefill_ms(prompt.uncomputed, prompt.context)

    def _chunk(self, prompt: Candidate) -> Iterator[PlannedSequence]:
        most = min(prompt.uncomputed, self._left, self._prefill_left)
        if not is_realtime(prompt):
            most = min(most, self._behind_left)
        ends = (end for service_class, end in self._ends if service_class <= prompt.service_class)
        promised_ms = min(ends, default=math.inf)
        promised = max(self._rows_until(promised_ms, most, prompt.context), self._least_rows(prompt, most))
        rows = min(promised, self._rows_until(self._longest_ms, most, prompt.context))
        if rows > 0:
            self._least -= min(self._least, rows)
            self._left -= rows
            self._prefill_left -= rows
            if not is_realtime(prompt):
                self._behind_left -= rows
            self.step_ms += self._cost.prefill_ms(rows, prompt.context)
            yield prompt.chunk(rows)

    def _least_rows(self, prompt: Candidate, most: int) -> int:
        """Rows that a prompt gets whatever those who decode were promised."""
        if is_realtime(prompt):
            return min(self._least, most)
        realtime_ms = min((end for c, end in self._ends if c is ServiceClass.REALTIME), default=math.inf)
        in_time = self._rows_until(realtime_ms, most, prompt.context)
        few = self._least - (_LEAST_PREFILL_ROWS - _LEAST_BESIDE_REALTIME)
        return min(self._least, most, max(few, in_time))

    def _root(self, candidate: Candidate) -> Iterator[PlannedSequence]:
        more_ms = self._cost.step_ms(self._rows + 1) - (self._cost.step_ms(self._rows) if self._rows else 0.0)
        latest_ms = min(self._longest_ms, *(end for _, end in self._ends))
        if self._left > 0 and self.step_ms + more_ms <= latest_ms:
            self._rows += 1
            self._left -= 1
            self.step_ms += more_ms
            yield candidate.planned()

    def _rows_until(self, end_ms: float, most: int, context: int) -> int:
        return self._cost.prefill_rows_within(max(0.0, end_ms - self.step_ms), most, context)


def is_realtime(candidate: Candidate) -> bool:
    """Whether it is of the most urgent class."""
    return candidate.service_class is ServiceClass.REALTIME
