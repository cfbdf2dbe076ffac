"""Sources that are not built in: whatever they do is counted and costs a bounded time, and no other source notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support import hostile_functions
from support.hostile_functions import REASONS

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import CommittedTokens, DraftSequence
from treeserve_speculator.sources.base import DraftSource
from treeserve_speculator.sources.isolated import IsolatedSource, Isolation
from treeserve_speculator.sources.user_function import FunctionSource

VOCAB = 300
PATIENT = Isolation(budget_s=5.0)
TIMEOUT_S = 10.0


class Rig:
    """One isolated source and what it counts."""

    def __init__(self, make: Callable[[], DraftSource], isolation: Isolation = PATIENT) -> None:
        self.registry = CollectorRegistry()
        self.metrics = SpeculatorMetrics(self.registry)
        self.source = IsolatedSource(
            make(), make, vocab_size=VOCAB, metrics=self.metrics, isolation=isolation, clock_s=lambda: self.now
        )
        self.now = 0.0

    def faults(self, reason: str) -> float:
        labels = {"source": self.source.name, "reason": reason}
        return self.registry.get_sample_value("treeserve_speculator_source_faults_total", labels) or 0.0


def of_function(function: Callable[..., Any], isolation: Isolation = PATIENT) -> Rig:
    return Rig(lambda: FunctionSource(function.__name__, function, VOCAB), isolation)


def sequence(*tokens: int, **fields: Any) -> DraftSequence:
    return DraftSequence(1, list(tokens or (5, 6, 7)), 2, SamplingParams(seed=9), 8, **fields)


class Gate:
    """A user function that waits until it is let through."""

    __name__ = "gate"

    def __init__(self) -> None:
        self.entered, self.opened = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, token_ids: list[int], budget: int) -> list[list[int]]:
        self.entered.release()
        assert self.opened.acquire(timeout=TIMEOUT_S)
        return [[token_ids[-1] + 1]]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.release(100)


def test_candidates_become_a_tree_by_their_common_beginnings() -> None:
    rig = of_function(lambda token_ids, budget: [[1, 2, 3], [1, 4], [9], [1, 2, 8]])
    tree = rig.source.propose(sequence(), 8)
    assert tree is not None and tree.log_probs is not None
    assert (tree.token_ids, tree.parents) == ((7, 1, 2, 3, 4, 9, 8), (-1, 0, 1, 2, 1, 0, 2))
    assert tree.log_probs[1] > tree.log_probs[5], "the candidate named first is the likelier one"
    small = rig.source.propose(sequence(), 3)
    assert small is not None and small.token_ids == (7, 1, 2, 3)


def test_a_function_sees_all_committed_tokens_and_cannot_change_them() -> None:
    seen: list[list[int]] = []

    def function(token_ids: list[int], budget: int) -> list[list[int]]:
        seen.append(list(token_ids))
        token_ids.clear()
        return [[1]]

    rig, state = of_function(function), sequence()
    rig.source.open(state)
    rig.source.propose(state, 8)
    state.tokens += [8, 9]
    rig.source.commit(state, [8, 9], [])
    assert rig.source.propose(state, 8) is not None
    assert seen == [[5, 6, 7], [5, 6, 7, 8, 9]] and state.tokens == [5, 6, 7, 8, 9]


def test_no_idea() -> None:
    for answer in (None, [], [[]]):
        rig = of_function(lambda token_ids, budget, answer=answer: answer)
        assert rig.source.propose(sequence(), 8) is None
        assert all(rig.faults(reason) == 0 for reason in REASONS.values())


@pytest.mark.parametrize("function", REASONS, ids=lambda function: function.__name__)
def test_a_bad_answer_is_counted_and_ends_the_source_for_that_sequence_alone(function: Callable[..., Any]) -> None:
    rig, first, second = of_function(function), sequence(), sequence()
    assert rig.source.propose(first, 8) is None
    assert rig.source.propose(first, 8) is None
    assert rig.faults(REASONS[function]) == 1
    assert rig.source.propose_batch([(second, 8), (first, 8)]) == [None, None]
    assert rig.faults(REASONS[function]) == 2


def test_what_has_no_end_is_cut_at_the_budget() -> None:
    tree = of_function(hostile_functions.endless).source.propose(sequence(), 4)
    assert tree is not None and tree.token_ids == (7, 1, 1, 1, 1)


def test_a_good_sequence_beside_a_bad_one_in_a_batch() -> None:
    def function(token_ids: list[int], budget: int) -> list[list[int]]:
        return [[1, 2]] if token_ids[-1] == 7 else [[-1]]

    rig = of_function(function)
    trees = rig.source.propose_batch([(sequence(), 8), (sequence(5, 6), 8), (sequence(), 1)])
    assert [tree and tree.token_ids for tree in trees] == [(7, 1, 2), None, (7, 1)]


def test_claimed_draws_are_not_believed_and_the_seed_is_hidden_where_it_would_bias() -> None:
    seeds: list[int] = []

    class Cheat(FunctionSource):
        def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
            seeds.append(state.sampling.seed)
            return TokenTree((7, 1), (-1, 0), (0.0, -0.1), draws=(Draws((1,), (1,), (1.0,)), None))

    rig = Rig(lambda: Cheat("cheat", lambda token_ids, budget: None, VOCAB))
    for rule in (AcceptanceRule.MULTI_STEP, AcceptanceRule.REPLAY):
        tree = rig.source.propose(sequence(acceptance=rule), 8)
        assert tree is not None and tree.draws is None
    assert seeds == [0, 9]


def test_a_late_answer_is_dropped_and_the_source_rests(gate: Gate) -> None:
    rig, state = of_function(gate, Isolation(budget_s=0.01, hang_s=100.0)), sequence()
    assert rig.source.propose(state, 8) is None
    assert rig.faults("late") == 1
    rig.now = 1.0
    assert rig.source.propose(state, 8) is None, "it is still busy and not asked"
    ask = rig.source._ask
    gate.opened.release()
    assert ask is not None and ask.done.wait(TIMEOUT_S)
    state.tokens += [8]
    rig.source.commit(state, [8], [])
    rig.source._isolation = PATIENT
    gate.opened.release()
    tree = rig.source.propose(state, 8)
    assert tree is not None and tree.token_ids == (8, 9), "a tree for what is committed now, and no older one"
    assert rig.faults("late") == 1


def test_a_slow_source_rests_ever_longer(gate: Gate) -> None:
    slow = of_function(gate, Isolation(budget_s=0.001, hang_s=100.0))
    rests: list[float] = []
    for _ in range(12):
        assert slow.source.propose(sequence(), 8) is None
        gate.opened.release()
        assert slow.source._ask is not None and slow.source._ask.done.wait(TIMEOUT_S)
        rests.append(slow.source._rests_until - slow.now)
        slow.now = slow.source._rests_until - 1e-9
        assert slow.source.propose(sequence(), 8) is None and slow.faults("late") == len(rests)
        slow.now += 1e-6
    assert rests[:3] == pytest.approx([0.002, 0.004, 0.008]) and rests[-1] == 1.0


def test_what_is_answered_in_time_counts_though_the_batch_is_late(gate: Gate) -> None:
    asked: list[int] = []

    def function(token_ids: list[int], budget: int) -> list[list[int]]:
        asked.append(token_ids[-1])
        return gate(token_ids, budget) if token_ids[-1] == 6 else [[1]]

    rig = of_function(function, Isolation(budget_s=0.5, hang_s=100.0))
    trees = rig.source.propose_batch([(sequence(), 8), (sequence(5, 6), 8), (sequence(), 8)])
    assert [tree and tree.token_ids for tree in trees] == [(7, 1), None, None]
    gate.opened.release()
    assert rig.source._ask is not None and rig.source._ask.done.wait(TIMEOUT_S)
    assert asked == [7, 6], "what nobody waits for any more is not asked for"


@pytest.mark.parametrize("function", [hostile_functions.spins, hostile_functions.hangs], ids=lambda f: f.__name__)
def test_a_source_that_hangs_is_started_anew_and_then_switched_off(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_functions, "HANG_S", 1.0)  # a thread that sleeps cannot be interrupted
    rig, state = of_function(function, Isolation(budget_s=0.001, hang_s=5.0, max_hangs=3)), sequence()
    threads = []
    for hangs in range(1, 4):
        threads.append(rig.source._worker._thread)  # type: ignore[union-attr]
        assert rig.source.propose(state, 8) is None
        rig.now += 4.0
        assert rig.source.propose(state, 8) is None and rig.faults("hung") == hangs - 1
        rig.now += 2.0
        rig.source.open(sequence())
        rig.source.commit(state, [8], [])
        rig.source._ready_worker(rig.now)
        assert rig.faults("hung") == hangs
    assert rig.source.is_off
    before = threading.active_count()
    rig.source.open(sequence())
    assert rig.source.propose(state, 8) is None
    rig.source.close(state)
    assert threading.active_count() <= before, "it is asked no more"
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_a_new_thread_knows_the_whole_sequence(gate: Gate) -> None:
    rig, state = of_function(gate, Isolation(budget_s=0.01, hang_s=5.0)), sequence()
    assert rig.source.propose(state, 8) is None
    state.tokens += [8]
    rig.source.commit(state, [8], [])
    rig.now += 6.0
    gate.opened.release(2)
    rig.source._isolation = PATIENT
    tree = rig.source.propose(state, 8)
    assert tree is not None and tree.token_ids == (8, 9)
    assert rig.faults("hung") == 1


def test_a_source_that_cannot_be_built_again_is_switched_off() -> None:
    made = []

    def make() -> DraftSource:
        if made:
            raise SystemExit("once is enough")
        made.append(1)
        return FunctionSource("spins", hostile_functions.spins, VOCAB)

    rig = Rig(make, Isolation(budget_s=0.01, hang_s=5.0, max_hangs=3))
    for _ in range(4):
        rig.source.propose(sequence(), 8)
        rig.now += 10.0
    assert rig.source.is_off and rig.faults("raised") == 2


def test_a_slow_source_delays_quick_ones_by_its_budget_at_most(gate: Gate) -> None:
    rig = of_function(gate, Isolation(budget_s=0.05, hang_s=100.0))

    class Quick(FunctionSource):
        pass

    quick = Quick("quick", lambda token_ids, budget: TokenTree.chain([token_ids[-1], 1], [0.0, -0.1]), VOCAB)
    drafter = Drafter(
        (rig.source, quick),
        vocab_size=VOCAB,
        eos_token_ids=frozenset(),
        limits=TreeLimits(64, 16),
        metrics=SpeculatorMetrics(CollectorRegistry()),
    )
    sequences = [sequence() for _ in range(8)]
    for state in sequences:
        drafter.open(state)
    started = time.monotonic()
    for _ in range(20):
        proposals = drafter.draft(sequences, TreeLimits(64, 16))
        assert [p.tree.token_ids for p in proposals] == [(7, 1)] * 8
    assert rig.faults("late") == 1
    assert 0.05 <= time.monotonic() - started < 4.0, "one budget, however many sequences and drafts"


def test_a_meddler_harms_only_itself() -> None:
    rig = Rig(lambda: hostile_functions.Meddler(None))  # type: ignore[arg-type]
    drafter = Drafter(
        (rig.source, FunctionSource("good", lambda token_ids, budget: [[1]], VOCAB)),
        vocab_size=VOCAB,
        eos_token_ids=frozenset(),
        limits=TreeLimits(64, 16),
        metrics=SpeculatorMetrics(CollectorRegistry()),
    )
    for _ in range(6):
        state = sequence(1, 2, 3, 4)
        drafter.open(state)
        for _ in range(4):
            (proposal,) = drafter.draft([state], TreeLimits(64, 16))
            assert proposal.tree.child(0, 1) is not None
            drafter.commit(state, CommittedTokens(1, len(state.tokens), (4,), 8))
        drafter.close(state)
        assert state.tokens == [1, 2, 3, 4, 4, 4, 4, 4] and state.prompt_len == 2
        assert state.disabled <= {"meddler"}
    assert rig.faults("raised") > 0
