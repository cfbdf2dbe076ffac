"""How much a verifier did: the seconds it would have taken if it were as full as its promises allow."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.decode_run import FinishedRun
from treeserve_verifier.executor import StepResult
from treeserve_verifier.promise import TPOT_SHARE, Promise

# The more of a verifier's time is taken, the longer newcomers wait.
_PROMISED_SHARE = 0.8


class WorkMeter:
    """Adds up steps at the prices of a full verifier, so that the sum says nothing of how full it is.

    A step takes about as long for one sequence as for four: a verifier with next to nothing to do is busy all the time,
    and how long its steps took says little of what it could still take. So a token costs what it does in the largest
    step that keeps to its time per output token,

        step_ms(n) / n,   n = the most sequences with step_ms(n) <= 0.9 TPOT that can run at once

    (or fewer, where that is cheaper: steps grow in stairs), and a prefill row what it lengthens a step by. What belongs
    to sequences with a target counts 1 / 0.8 times: what was promised to be quick cannot fill a verifier. One second of
    work a second is all that one verifier can do.

    Attributes:
        work_s: sum over all steps, seconds.
        drafting_s: time that speculators spent on trees, seconds.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.work_s = 0.0
        self.drafting_s = 0.0

    def did(self, results: Iterable[StepResult], capacity: int) -> None:
        """A step is done.

        Args:
            capacity: sequences that can run at once.
        """
        tokens: list[tuple[Promise, int]] = []
        for result in results:
            planned, promise = result.planned, result.planned.sequence.promise
            if planned.prefill_rows:
                self._add(promise, self._cost.prefill_ms(planned.prefill_rows, planned.context))
            if result.outcome is not None:
                tokens.append((promise, len(result.outcome.token_ids)))
        self._emitted(tokens, capacity)

    def ran(self, run: FinishedRun, capacity: int) -> None:
        """A run of steps is done. `capacity` as for `did`."""
        tokens: list[tuple[Promise, int]] = []
        for sequence, described, ran in zip(run.plan.sequences, run.plan.of_each, run.ran.sequences, strict=True):
            prefilled = ran.num_read - (ran.num_read == len(described.unread))
            if prefilled > 0:
                context = described.num_tokens - len(described.unread)
                self._add(sequence.promise, self._cost.prefill_ms(prefilled, context))
            tokens.append((sequence.promise, len(ran.token_ids)))
        self._emitted(tokens, capacity)

    def _emitted(self, tokens: Iterable[tuple[Promise, int]], capacity: int) -> None:
        """So many tokens were emitted for the sequences with these promises."""
        token_ms: dict[float | None, float] = {}
        for promise, count in tokens:
            if promise.tpot_ms not in token_ms:
                token_ms[promise.tpot_ms] = self._token_ms(promise.tpot_ms, capacity)
            self._add(promise, token_ms[promise.tpot_ms] * count)

    def _add(self, promise: Promise, ms: float) -> None:
        has_target = promise.ttft_ms is not None or promise.tpot_ms is not None
        self.work_s += ms / 1e3 / (_PROMISED_SHARE if has_target else 1.0)

    def drafted(self, seconds: float) -> None:
        """A speculator spent this time on trees."""
        self.drafting_s += seconds

    def _token_ms(self, tpot_ms: float | None, capacity: int) -> float:
        """What a token costs in the largest step that keeps to this target."""
        most = capacity
        if tpot_ms is not None:
            longest_ms = TPOT_SHARE * tpot_ms
            most = max(bisect.bisect_right(range(1, capacity + 1), longest_ms, key=self._cost.step_ms), 1)
        sizes = (most, *(1 << i for i in range(most.bit_length())))
        return min(self._cost.step_ms(n) / n for n in sizes)
