"""A draft source that is not built in: in a thread of its own, where the most it can cost is time.

It shares the interpreter. What keeps the interpreter's lock (a call into C that does not let go of it) or ends the
process cannot be held off here; such a source belongs in a speculator of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.tree import TokenTree
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import DraftSource
from treeserve_speculator.sources.source_thread import Ask, SourceThread

_MAX_REST_S = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Isolation:
    """How much patience a source meets.

    Attributes:
        budget_s: longest wait for its trees, per batch. Sources that were asked before it or after it lose no more.
        hang_s: time without an answer after which its thread is given up and another one takes its place.
        max_hangs: threads that are given up before the source is switched off.
    """

    budget_s: float = 0.02
    hang_s: float = 2.0
    max_hangs: int = 3


class IsolatedSource:
    """A source (`BatchDraftSource`) behind a thread; no call raises or takes longer than the budget.

    - A tree that comes late is dropped. A source that is often late rests: 2, 4, 8 .. budgets, at most 1 s.
    - A sequence on which it raises or answers what is no tree is closed for it, as for any source.
    - A source that hangs gets a new thread and a new instance; the `max_hangs`-th time it is switched off.

    It sees copies of the sequences, so it can change none.

    Args:
        source: the first instance.
        make: builds the next one, in the thread that takes over.
    """

    def __init__(
        self,
        source: DraftSource,
        make: Callable[[], DraftSource],
        *,
        vocab_size: int,
        metrics: SpeculatorMetrics,
        isolation: Isolation = Isolation(),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = source.name
        self.wants_top_tokens = source.wants_top_tokens
        self._make = make
        self._isolation = isolation
        self._clock_s = clock_s
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._worker: SourceThread | None = self._new_worker(lambda: source)
        self._known: set[DraftSequence] = set()  # to the worker
        self._ask: Ask | None = None
        self._hangs = 0
        self._late_in_a_row = 0
        self._rests_until = 0.0

    @property
    def is_off(self) -> bool:
        """Whether it was switched off."""
        return self._worker is None

    def open(self, state: DraftSequence) -> None:
        """Introduce a sequence, now or, if the source is busy, when a tree is asked for."""
        if self._worker is not None and (self._ask is None or self._ask.done.is_set()):
            self._introduce(self._worker, state)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Pass on what was committed."""
        if self._worker is not None and state in self._known:
            self._worker.commit(state, tuple(new_tokens), tuple(map(tuple, top_tokens)))

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The source's tree if it comes in time."""
        return self.propose_batch([(state, budget)])[0]

    def propose_batch(self, wanted: Sequence[tuple[DraftSequence, int]]) -> list[TokenTree | None]:
        """The trees that come in time."""
        now = self._clock_s()
        worker = self._ready_worker(now)
        if worker is None or not wanted:
            return [None] * len(wanted)
        for state, _ in wanted:
            if state not in self._known:
                self._introduce(worker, state)
        ask = self._ask = Ask(tuple(wanted), now)
        worker.propose(ask)
        if ask.done.wait(self._isolation.budget_s):
            self._late_in_a_row = 0
        else:
            ask.expired = True
            self._rest()
        trees = list(ask.trees)
        return trees + [None] * (len(wanted) - len(trees))

    def close(self, state: DraftSequence) -> None:
        """Let the source forget a sequence."""
        if state in self._known:
            self._known.remove(state)
            if self._worker is not None:
                self._worker.close(state)

    def _ready_worker(self, now: float) -> SourceThread | None:
        """The worker if it has nothing left to answer and does not rest; one that hangs is replaced."""
        if self._ask is not None and not self._ask.done.is_set():
            if now - self._ask.asked_at < self._isolation.hang_s:
                return None
            self._replace_worker()
        return self._worker if now >= self._rests_until else None

    def _new_worker(self, make: Callable[[], DraftSource]) -> SourceThread:
        return SourceThread(self.name, make, self._vocab_size, self._count)

    def _count(self, reason: str) -> None:
        self._metrics.source_faults.labels(self.name, reason).inc()

    def _introduce(self, worker: SourceThread, state: DraftSequence) -> None:
        self._known.add(state)
        worker.open(state, _copied(state))

    def _rest(self) -> None:
        self._count("late")
        self._late_in_a_row += 1
        rest_s = self._isolation.budget_s * 2.0 ** min(self._late_in_a_row, 16)
        self._rests_until = self._clock_s() + min(rest_s, _MAX_REST_S)

    def _replace_worker(self) -> None:
        assert self._worker is not None  # it owes an answer
        self._worker.give_up()
        self._known.clear()
        self._ask = None
        self._hangs += 1
        self._count("hung")
        if self._hangs < self._isolation.max_hangs:
            _log.warning("draft source hangs, started anew", source=self.name, hangs=self._hangs)
            self._worker = self._new_worker(self._make)
        else:
            _log.error("draft source switched off: it hangs again and again", source=self.name, hangs=self._hangs)
            self._worker = None


def _copied(state: DraftSequence) -> DraftSequence:
    """What a source may know of a sequence, sharing nothing with it that could be changed."""
    # Acceptance that draws uniforms is unbiased only if no drafter can know them.
    seed = 0 if state.acceptance is AcceptanceRule.MULTI_STEP else state.sampling.seed
    return DraftSequence(
        handle=state.handle,
        tokens=list(state.tokens),
        prompt_len=state.prompt_len,
        sampling=replace(state.sampling, seed=seed, logit_bias=dict(state.sampling.logit_bias)),
        budget=state.budget,
        acceptance=state.acceptance,
        tenant=state.tenant,
        preset=state.preset,
    )
