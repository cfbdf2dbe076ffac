"""What speculation costs where it cannot help, and how much of its gain it reaches where it can: simulated services.

Steps, drafting and the way between take the times that were measured on two cores; the desk, the planner and the cost
model are the real ones, on a clock of the simulation's own.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from support.sequences import make_config, make_sequence

from treeserve_core.errors import StaleBaseError
from treeserve_core.outcome import FinishReason, VerifyOutcome
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Sequence as Decoding
from treeserve_verifier.speculator import CommitNotice
from treeserve_verifier.step_plan import Candidate, PlannedSequence

STEP_MS = {1: 3.75, 4: 4.2, 8: 4.5, 12: 5.7, 16: 7.0, 24: 10.0, 32: 13.0, 48: 19.5, 64: 26.0}
LATENCY_S = 0.0008
TREE_S = 0.0001  # for each further tree of a moment
ASK_CPU_S = 0.0004  # what an ask that nobody waits for takes from the step that runs meanwhile
FURTHER_ASK_CPU_S = 0.00012
DRAFT_LENGTH = 10
PROMPT = (1, 2, 3)

Foreseen = Callable[[int], int]  # output position -> how many of the tokens from there a drafter would foresee


def nothing(position: int) -> int:
    """Text that cannot be foreseen."""
    return 0


def everything(position: int) -> int:
    """Text that was there before."""
    return DRAFT_LENGTH


def now_and_then(position: int) -> int:
    """Text in which one tree in ten is right by chance, for one token."""
    return 1 if random.Random(position).random() < 0.1 else 0


def copied_from(start: int, end: int) -> Foreseen:
    """New text with one copied passage."""
    return lambda position: min(DRAFT_LENGTH, end - position) if start <= position < end else 0


@dataclass
class Run:
    """How long it took, and when each sequence had which length."""

    duration_s: float
    asks: int
    waited_s: float
    times: list[list[tuple[int, float]]]


class Simulation:
    """Sequences that decode together, and one speculator. An outbox of the desk's, too."""

    def __init__(
        self, texts: Sequence[Foreseen], tokens: int, *, speculates: bool = True, always: bool = False
    ) -> None:
        config = make_config(max_context_tokens=1024, kv_tokens=32768, max_nodes=16, step_rows=256, max_sequences=32)
        self.now = 0.0
        self._blocks = BlockManager(config.kv_tokens // config.block_size, config.block_size)
        self._scheduler = Scheduler(config, self._blocks, lambda sequence: self._desk.close(sequence), lambda: self.now)
        self._texts = texts
        self._cost = CostModel(STEP_MS)
        self._planner = StepPlanner(config, CostModel.free_rows() if always else self._cost)
        self._desk = DraftDesk(
            lambda: self.now,
            0.015,
            lambda sequence: self._planner.draft_budget(sequence, len(self._scheduler.running)) if speculates else 0,
            lambda: self._planner.prices(len(self._scheduler.running)),
        )
        self._asked: list[int] = []  # handles
        self._coming: list[tuple[float, int, int]] = []  # arrival, handle, base
        self._cpu_s = 0.0
        rngs = [random.Random(i) for i in range(len(texts))]
        self._truths = [[rng.randrange(10, 10**5) for _ in range(tokens)] for rng in rngs]
        self._sequences = [make_sequence(PROMPT, tokens) for _ in texts]
        self._speculator = self._desk.attach("s", ("copy",), self, wants_top_tokens=False)

    def assign(self, handle: int, sequence: Decoding, budget: int) -> None:
        if budget:
            self._asked.append(handle)

    def commit(self, notice: CommitNotice) -> None:
        self._asked.append(notice.handle)

    def release(self, handle: int) -> None:
        pass

    def run(self) -> Run:
        """Decode everything."""
        for sequence in self._sequences:
            self._scheduler.submit(sequence)
        for sequence in self._scheduler.admit():
            self._desk.open(sequence)
            self._blocks.reserve(sequence.seq_id, len(PROMPT) - 1)
            self._blocks.commit(sequence.seq_id, range(len(PROMPT) - 1), PROMPT[:-1])
        waited_s = 0.0
        times: list[list[tuple[int, float]]] = [[] for _ in self._sequences]
        while self._scheduler.running:
            waited_s += self._wait()
            trees = [Candidate(s, 1, self._desk.tree(s)) for s in self._scheduler.running]
            plan = self._scheduler.reserve(self._planner.plan(trees))
            self._deliver_until(self.now + self._cost.step_ms(plan.rows) / 1e3 + self._cpu_s)
            self._cpu_s = 0.0
            node_cost = self._planner.node_cost(plan)
            for planned in plan.sequences:
                self._accept(planned, node_cost * (planned.rows - 1))
                times[self._sequences.index(planned.sequence)].append((self._position(planned.sequence), self.now))
            self._draft()
        return Run(self.now, self._desk.asks, waited_s, times)

    def _wait(self) -> float:
        """Let time pass as the verify loop would."""
        start = self.now
        while (until := self._desk.wait_until(self._scheduler.running)) > self.now:
            arrival = min((a for a, _, _ in self._coming), default=math.inf)
            self._deliver_until(min(arrival, until))
        if self.now > start:
            self._cpu_s = 0.0  # the drafter worked while nothing else did
        return self.now - start

    def _draft(self) -> None:
        for n, handle in enumerate(self._asked):
            self._cpu_s += FURTHER_ASK_CPU_S if n else ASK_CPU_S
            base = len(self._speculator.sequences[handle].tokens)
            self._coming.append((self.now + LATENCY_S + n * TREE_S, handle, base))
        self._asked.clear()

    def _deliver_until(self, time: float) -> None:
        for arrival, handle, base in sorted(c for c in self._coming if c[0] <= time):
            self._coming.remove((arrival, handle, base))
            self.now = max(self.now, arrival)
            sequence = self._speculator.sequences.get(handle)
            if sequence is not None:
                with contextlib.suppress(StaleBaseError):
                    self._desk.propose(self._speculator, handle, DraftProposal(base, self._tree(sequence, base)))
        self.now = max(self.now, time)

    def _tree(self, sequence: Decoding, base: int) -> TokenTree:
        index, position = self._sequences.index(sequence), base - len(PROMPT)
        right = self._truths[index][position:][: self._texts[index](position)]
        wrong = range(10**6, 10**6 + DRAFT_LENGTH - len(right))
        log_probs = [math.log(min(0.85, (0.4 if right else 0.2) + 0.15 * n)) for n in range(DRAFT_LENGTH)]
        return TokenTree.chain([sequence.tokens[base - 1], *right, *wrong], [0.0, *log_probs])

    def _accept(self, planned: PlannedSequence, spent: float) -> None:
        sequence, tree = planned.sequence, planned.tree
        assert tree is not None
        rest = self._truths[self._sequences.index(sequence)][self._position(sequence) :]
        node: int | None = 0
        emitted: list[int] = []
        accepted: list[int] = []
        while node is not None and len(emitted) < len(rest):
            emitted.append(rest[len(emitted)])
            node = tree.child(node, emitted[-1])
            accepted += [node] if node is not None else []
        reason = FinishReason.LENGTH if len(emitted) == len(rest) else None
        base_len = len(sequence.tokens)
        kept = (0, *accepted)
        self._blocks.commit(sequence.seq_id, kept, [tree.token_ids[node] for node in kept])
        self._scheduler.settle(planned, VerifyOutcome(tuple(accepted), tuple(emitted), reason))
        if reason is None:
            self._desk.committed(sequence, base_len, (), spent)

    def _position(self, sequence: Decoding) -> int:
        return len(sequence.tokens) - len(PROMPT)


def _cost(text: Foreseen, sequences: int, tokens: int) -> float:
    """Time with speculation over time without."""
    on = Simulation([text] * sequences, tokens).run()
    off = Simulation([text] * sequences, tokens, speculates=False).run()
    assert off.asks == 0 and off.waited_s == 0.0
    return on.duration_s / off.duration_s


@pytest.mark.parametrize(("tokens", "most"), [(128, 1.02), (512, 1.01)])
@pytest.mark.parametrize("text", [nothing, now_and_then])
def test_text_that_cannot_be_foreseen_costs_next_to_nothing(text: Foreseen, tokens: int, most: float) -> None:
    assert _cost(text, 1, tokens) < most


@pytest.mark.parametrize(("sequences", "most"), [(4, 1.025), (8, 1.025), (16, 1.0), (32, 1.0)])
def test_nor_does_it_in_a_batch(sequences: int, most: float) -> None:
    assert _cost(nothing, sequences, 128) <= most


@pytest.mark.parametrize(("sequences", "share"), [(1, 0.97), (2, 0.92), (4, 0.9), (8, 0.65)])
def test_copied_text_reaches_almost_all_that_drafting_can_give(sequences: int, share: float) -> None:
    """In larger batches less: there a node must be almost certain to pay, which the drafter's claims become slowly."""
    texts = [everything] * sequences
    off = Simulation(texts, 256, speculates=False).run().duration_s
    on = Simulation(texts, 256).run().duration_s
    best = Simulation(texts, 256, always=True).run().duration_s
    assert off / best > 1.2, "else there is nothing to reach"
    assert off - on > share * (off - best)


def test_a_passage_that_is_copied_is_noticed_soon_and_so_is_its_end() -> None:
    start, end, tokens = 200, 400, 600
    text = copied_from(start, end)
    run = Simulation([text], tokens).run()
    position_at = {time: position for position, time in run.times[0]}
    steps = sorted(position_at.values())
    sizes = {b: b - a for a, b in zip([0, *steps], steps, strict=False)}
    first_long = min(position for position, size in sizes.items() if size > 5)
    assert start < first_long <= start + 32 + 2 + DRAFT_LENGTH, "one tree in 32 tokens is drawn to notice it"
    assert sum(1 for position in sizes if first_long < position <= end) < 1.5 * (end - first_long) / (DRAFT_LENGTH + 1)
    off = Simulation([text], tokens, speculates=False).run()
    last = dict(off.times[0])
    tail_on = run.duration_s - min(time for time, position in position_at.items() if position >= end)
    tail_off = off.duration_s - last[end]
    assert tail_on < 1.06 * tail_off, "200 more tokens: some ten trees in vain, and then hardly any"


def test_a_sequence_without_luck_does_not_hold_up_one_that_has_it() -> None:
    run = Simulation([everything, nothing, nothing], 256).run()
    alone = Simulation([everything], 256).run()
    done = run.times[0][-1][1]
    assert done < 1.6 * alone.duration_s
