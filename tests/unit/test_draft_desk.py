"""The draft desk: who drafts for whom, which trees count, and how long a step waits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from support.sequences import make_sequence

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.planner import Prices
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice, Speculator

MAX_WAIT_S = 0.01
UNANSWERED = 32


@dataclass
class Outbox:
    """Records what a speculator is told."""

    assigned: dict[int, Sequence] = field(default_factory=dict)
    budgets: list[int] = field(default_factory=list)
    commits: list[CommitNotice] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        self.assigned[handle] = sequence
        self.budgets.append(budget)

    def commit(self, notice: CommitNotice) -> None:
        self.commits.append(notice)

    def release(self, handle: int) -> None:
        self.released.append(handle)


class Bench:
    """A desk on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.budget = 4
        self.prices = Prices(token_s=0.004, row=0.1)
        self.desk = DraftDesk(lambda: self.now, MAX_WAIT_S, lambda sequence: self.budget, lambda: self.prices)

    def attach(self, *sources: str, wants_top_tokens: bool = False) -> tuple[Speculator, Outbox]:
        outbox = Outbox()
        return self.desk.attach("s", sources, outbox, wants_top_tokens=wants_top_tokens), outbox

    def open(self, sequence: Sequence) -> Sequence:
        """Open a sequence and run its prefill: from its first token on, trees are asked for."""
        self.desk.open(sequence)
        self.advance(sequence, 4)
        return sequence

    def advance(self, sequence: Sequence, *tokens: int, spent: float = 0.0) -> None:
        """A step that emits these tokens; its trees are offered to it."""
        self.desk.tree(sequence)
        base = len(sequence.tokens)
        sequence.tokens.extend(tokens)
        self.desk.committed(sequence, base, tuple((t,) for t in tokens), spent)

    def waits(self, *sequences: Sequence) -> float:
        """How long a step of these sequences would wait from now on."""
        return max(0.0, self.desk.wait_until(sequences) - self.now)


def _chain(sequence: Sequence, *tokens: int) -> DraftProposal:
    return DraftProposal(len(sequence.tokens), TokenTree.chain((sequence.tokens[-1], *tokens)))


def test_a_tree_is_offered_until_it_does_not_fit() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    assert bench.desk.tree(sequence) is None
    bench.desk.propose(speculator, 1, _chain(sequence, 7, 8, 9))
    assert bench.desk.tree(sequence) == TokenTree.chain((3, 7, 8, 9))
    bench.advance(sequence, 7)
    assert bench.desk.tree(sequence) == TokenTree.chain((7, 8, 9)), "re-rooted along what was committed"
    bench.advance(sequence, 42)
    assert bench.desk.tree(sequence) is None


def test_same_sources_share_and_different_sources_merge() -> None:
    bench = Bench()
    (a, a_box), (b, b_box) = bench.attach("ngram"), bench.attach("ngram")
    other, other_box = bench.attach("ssm")
    sequences = [make_sequence() for _ in range(4)]
    for sequence in sequences:
        bench.desk.open(sequence)
    assert (len(a_box.assigned), len(b_box.assigned), len(other_box.assigned)) == (2, 2, 4)
    first = sequences[0]
    owner, box = (a, a_box) if first in a_box.assigned.values() else (b, b_box)
    handle = next(h for h, s in box.assigned.items() if s is first)
    other_handle = next(h for h, s in other_box.assigned.items() if s is first)
    masked = TokenTree((3, 7), (-1, 0), None, (1, 1))
    bench.desk.propose(owner, handle, DraftProposal(3, masked))
    bench.desk.propose(other, other_handle, DraftProposal(3, TokenTree((3, 7, 8), (-1, 0, 0), None, (1, 1, 1))))
    tree = bench.desk.tree(first)
    assert tree is not None and tree.source_masks is not None
    assert {t: bench.desk.source_names(m) for t, m in zip(tree.token_ids, tree.source_masks, strict=True)} == {
        3: ["ngram", "ssm"],
        7: ["ngram", "ssm"],
        8: ["ssm"],
    }


def test_sequences_of_a_lost_speculator_move_to_its_twin() -> None:
    bench = Bench()
    (a, a_box), (_, b_box) = bench.attach("ngram"), bench.attach("ngram")
    sequences = [make_sequence() for _ in range(2)]
    for sequence in sequences:
        bench.desk.open(sequence)
    bench.desk.detach(a)
    assert set(b_box.assigned.values()) == set(sequences)
    for sequence in sequences:
        bench.desk.close(sequence)
    assert sorted(b_box.released) == sorted(b_box.assigned)
    assert a_box.released == [], "a stream that is gone is told nothing"


def test_a_speculator_that_comes_later_gets_the_open_sequences() -> None:
    bench = Bench()
    sequence, plain = make_sequence(), make_sequence(limits=SequenceLimits(max_nodes=0))
    bench.desk.open(sequence)
    bench.desk.open(plain)
    _, box = bench.attach("ngram")
    assert list(box.assigned.values()) == [sequence], "a request without speculation is never drafted for"


def test_opening_twice_assigns_once() -> None:
    bench = Bench()
    _, box = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    bench.desk.open(sequence)  # after a preemption
    assert len(box.assigned) == 1


def test_proposals_that_do_not_fit_are_refused_for_themselves() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    with pytest.raises(NotFoundError):
        bench.desk.propose(speculator, 9, _chain(sequence, 7))
    with pytest.raises(StaleBaseError):
        bench.desk.propose(speculator, 1, DraftProposal(2, TokenTree.chain((2, 50))))
    with pytest.raises(StaleBaseError):
        bench.desk.propose(speculator, 1, DraftProposal(4, TokenTree.chain((3, 7))))
    assert bench.desk.tree(sequence) is None
    bench.desk.close(sequence)
    assert bench.desk.propose(speculator, 1, _chain(sequence, 7)) is None, "a race with the end is not an error"


def test_a_reordered_older_tree_does_not_replace_a_newer_one() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    older = _chain(sequence, 7, 1)
    bench.advance(sequence, 7)
    bench.desk.propose(speculator, 1, _chain(sequence, 8))
    bench.desk.propose(speculator, 1, older)
    assert bench.desk.tree(sequence) == TokenTree.chain((7, 8))


def test_a_sequence_is_read_at_once_and_drafted_for_from_its_first_root_on() -> None:
    bench = Bench()
    _, box = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    assert list(box.assigned.values()) == [sequence] and box.budgets == [0]
    assert bench.waits(sequence) == 0.0, "nothing was asked for"
    bench.advance(sequence, 4)
    assert [(n.base_committed_len, n.token_ids, n.budget) for n in box.commits] == [(3, (4,), 4)]
    assert bench.waits(sequence) > 0.0


def test_a_step_waits_only_while_the_trees_are_expected_to_save_more() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    assert bench.waits(sequence) == pytest.approx(0.004), "a new sequence's tree is expected to save one token"
    bench.now += 0.001
    bench.desk.propose(speculator, 1, _chain(sequence, 7, 8))
    assert bench.waits(sequence) == 0.0, "the tree is here"
    assert speculator.latency_s == pytest.approx(0.001)
    bench.advance(sequence, 7, 8, 9)
    assert bench.waits(sequence) == pytest.approx(0.004 * 4 / 3), "1 + (2 - 1) / 3 tokens"
    speculator.latency_s = 0.004 * 4 / 3 / 1.5 + 1e-6
    assert bench.waits(sequence) == 0.0, "it takes too long for what it is worth"
    speculator.latency_s = 0.001
    bench.prices = Prices(token_s=0.1, row=0.1)
    assert bench.waits(sequence) == pytest.approx(MAX_WAIT_S)


def test_what_waiting_costs_all_is_weighed_against_what_the_trees_bring_together() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequences = [bench.open(make_sequence()) for _ in range(2)]
    speculator.latency_s = 0.005
    assert bench.waits(sequences[0]) == 0.0, "one tree saves 4 ms"
    assert bench.waits(*sequences) == pytest.approx(0.008)
    bench.now += 0.005
    bench.desk.propose(speculator, 1, _chain(sequences[0], 7))
    assert bench.waits(*sequences) == 0.0, "only one is missing now"


def test_a_tree_at_hand_is_not_waited_for_again() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    bench.desk.propose(speculator, 1, _chain(sequence, 7, 8, 9))
    bench.advance(sequence, 7)
    assert bench.waits(sequence) == 0.0, "the rest of the last tree is as good as what may come"
    bench.advance(sequence, 8, 9, 10)
    assert bench.desk.tree(sequence) is None


def test_a_silent_speculator_costs_one_wait_and_is_asked_again_later() -> None:
    bench = Bench()
    speculator, box = bench.attach("ngram")
    sequence, other = bench.open(make_sequence()), bench.open(make_sequence())
    wait = bench.waits(sequence)
    assert wait > 0.0
    bench.now += wait
    for _ in range(UNANSWERED - 1):
        bench.advance(sequence, 7)
        bench.now += 0.004
        assert bench.waits(sequence, other) == 0.0
    assert len(box.commits) == 2, "one ask is under way for each"
    bench.advance(sequence, 7)
    assert len(box.commits) == 3 and len(box.commits[-1].token_ids) == UNANSWERED, "it may have been lost"
    assert bench.waits(sequence) == 0.0
    bench.desk.propose(speculator, 1, _chain(sequence, 7))
    bench.advance(sequence, 7, 8)
    assert bench.waits(sequence) > 0.0, "it answers again"


def test_one_late_answer_hardly_counts_and_a_slow_speculator_is_not_waited_for() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    for latency_s in (0.001, 0.02, 0.001):
        bench.now += latency_s
        bench.desk.propose(speculator, 1, _chain(sequence, 7))
        bench.advance(sequence, 7, 8)
    assert speculator.latency_s < 0.0025 and bench.waits(sequence) > 0.0
    for _ in range(10):
        bench.now += 0.02
        bench.desk.propose(speculator, 1, _chain(sequence, 7))
        bench.advance(sequence, 7, 8)
    assert bench.waits(sequence) == 0.0


def test_asks_become_rare_while_trees_fail_and_carry_all_tokens() -> None:
    bench = Bench()
    speculator, box = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    asked_at = []
    for position in range(400):
        bench.now += 0.001
        if speculator.asked:
            bench.desk.propose(speculator, 1, _chain(sequence, 77))
        before = len(box.commits)
        bench.now += 0.004
        bench.waits(sequence)
        bench.advance(sequence, 1000 + position)
        asked_at += [len(sequence.tokens)] * (len(box.commits) - before)
    gaps = [b - a for a, b in itertools.pairwise(asked_at)]
    assert gaps == sorted(gaps) and gaps[0] == 1
    assert min(gaps[-5:]) >= 0.0015 / 0.01 / 0.005, "asking takes a hundredth of the time at most"
    assert len(asked_at) < 400 / 32 + 14, "the first few told little, then it is tried now and then"
    told = [token for notice in box.commits for token in notice.token_ids]
    assert told == sequence.tokens[3 : 3 + len(told)], "no gap and no repeat"
    bench.now += 0.001
    while not speculator.asked:
        bench.waits(sequence)
        bench.advance(sequence, 1)
        bench.now += 0.004
    bench.desk.propose(speculator, 1, _chain(sequence, 7, 8, 9, 10))
    bench.advance(sequence, 7)
    bench.advance(sequence, 8, 9, 10, 11)
    assert speculator.asked and bench.waits(sequence) > 0.0, "the first tree that comes true brings every ask back"


def test_a_run_of_plain_steps_is_not_broken_where_nobody_is_asked() -> None:
    bench = Bench()
    alone = bench.open(make_sequence())
    assert bench.desk.tokens_until_ask(alone) > 1_000_000, "nobody drafts for it"
    speculator, box = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    handle = next(handle for handle, assigned in box.assigned.items() if assigned is sequence)
    seen = set()
    for position in range(400):
        bench.now += 0.004
        if handle in speculator.asked:
            bench.desk.propose(speculator, handle, _chain(sequence, 77))
        bench.waits(sequence)
        due, before = bench.desk.tokens_until_ask(sequence), len(box.commits)
        bench.advance(sequence, 1000 + position)
        assert len(box.commits) == before or due == 1, "nothing is asked for unannounced"
        seen.add((due == 1, len(box.commits) > before))
    assert seen >= {(True, True), (False, False)}


def test_many_sequences_without_luck_are_tried_in_turn_and_not_more_often_than_one() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequences = [bench.open(make_sequence()) for _ in range(8)]
    asked: list[int] = []
    for step in range(4000):
        bench.now += 0.001
        for handle in list(speculator.asked):
            asked.append(handle)
            sequence = speculator.sequences[handle]
            bench.desk.propose(speculator, handle, DraftProposal(len(sequence.tokens), _chain(sequence, 77).tree))
        bench.waits(*sequences)
        for i, sequence in enumerate(sequences):
            bench.advance(sequence, 1000 + 8 * step + i)
        bench.now += 0.004
    tried = asked[-16:]
    assert sorted(tried) == sorted([*range(1, 9), *range(1, 9)]), "in turn"
    assert len(asked) < 20.0 * 0.01 / 0.0015 + 8 * 12, "a hundredth of 20 s, and the trees before that was known"


def test_a_sequence_that_repeats_itself_is_found_without_asking() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram", wants_top_tokens=True)
    speculator.latency_s = speculator.tree_s = 0.002
    speculator.saves = 0.0
    speculator.probe_at = 1e9
    sequence = bench.open(make_sequence(tuple(range(10, 60)), max_tokens=200))
    bench.waits(sequence)
    for token in range(500, 520):
        bench.advance(sequence, token)
    assert speculator.eager == 0 and not bench.desk.wants_top_tokens(sequence)
    repeated = 0
    while speculator.eager == 0:
        bench.advance(sequence, 20 + repeated)
        repeated += 1
    assert repeated == 7, "three tokens to find the place, four to believe it"
    assert speculator.asked and bench.desk.wants_top_tokens(sequence)


def test_a_tree_without_an_idea_counts_as_one_that_failed() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    seen = []
    for _ in range(6):
        if speculator.asked:
            bench.desk.propose(speculator, 1, _chain(sequence))
        assert bench.waits(sequence) == 0.0 and bench.desk.tree(sequence) is None
        bench.advance(sequence, 7)
        seen.append(bench.waits(sequence))
    assert seen[0] > seen[1] > seen[2] > 0.0


def test_pruned_nodes_and_nodes_that_cost_what_they_save_are_worth_nothing() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    right, pruned, costly = (bench.open(make_sequence()) for _ in range(3))
    for handle, sequence in enumerate((right, pruned, costly), start=1):
        bench.desk.propose(speculator, handle, _chain(sequence, 7, 8, 9))
    bench.advance(right, 7, 8, 9, 10)
    for token in (7, 8, 9):  # each is the bonus token of a step that used none of the tree's nodes
        bench.advance(pruned, token)
    bench.advance(costly, 7, 8, 9, 10, spent=3.0)
    worth = [bench.desk.wait_until([s]) - speculator.silent_since for s in (right, costly)]
    assert worth == pytest.approx([0.004 * (1 + 2 / 3), 0.004 * 2 / 3])
    assert bench.desk._seats[pruned][0].pace.saves == pytest.approx(2 / 3)


def test_nobody_is_assigned_or_asked_where_no_node_would_pay() -> None:
    bench = Bench()
    speculator, box = bench.attach("ngram")
    sequence = make_sequence()
    bench.budget = 0
    bench.open(sequence)
    for _ in range(5):
        assert bench.waits(sequence) == 0.0
        bench.advance(sequence, 7)
    assert not box.assigned and not box.commits and not speculator.asked
    bench.budget = 4
    bench.now += 0.25
    bench.waits(sequence)
    bench.advance(sequence, 7)
    assert box.assigned and box.budgets == [4] and bench.waits(sequence) > 0.0, "from here on some would"
    bench.desk.close(sequence)
    assert box.released == [1]
    bench.budget = 0
    unknown = bench.open(make_sequence())
    bench.desk.close(unknown)
    assert box.released == [1], "nothing is released that was never assigned"


def test_top_tokens_go_only_to_those_who_want_them() -> None:
    bench = Bench()
    _, plain = bench.attach("ngram")
    _, recycling = bench.attach("recycling", wants_top_tokens=True)
    sequence = make_sequence()
    bench.desk.open(sequence)
    assert bench.desk.wants_top_tokens(sequence)
    bench.advance(sequence, 5, 6)
    assert plain.commits[0].top_token_ids == () and recycling.commits[0].top_token_ids == ((5,), (6,))
    assert recycling.commits[0].token_ids == (5, 6) and recycling.commits[0].base_committed_len == 3


def test_a_tree_is_credited_with_what_no_quicker_one_had() -> None:
    bench = Bench()
    (quick, _), (slow, _) = bench.attach("ngram"), bench.attach("ssm")
    sequence = bench.open(make_sequence())
    for _ in range(40):
        for speculator, seconds in ((quick, 0.0005), (slow, 0.0015)):
            bench.now += seconds
            if 1 in speculator.asked:
                bench.desk.propose(speculator, 1, _chain(sequence, 7, 8))
        bench.advance(sequence, 7, 8, 9)
    assert (quick.eager, slow.eager) == (1, 0), "the slow one had nothing that the quick one had not"
    for _ in range(400):  # it is tried now and then
        bench.waits(sequence)
        for speculator, seconds, tokens in ((quick, 0.0005, (7,)), (slow, 0.0015, (7, 8, 9, 10))):
            bench.now += seconds
            if 1 in speculator.asked:
                bench.desk.propose(speculator, 1, _chain(sequence, *tokens))
        bench.advance(sequence, 7, 8, 9, 10, 11)
    assert (quick.eager, slow.eager) == (1, 1), "three of its four tokens were its own"


def test_what_drafts_here_stands_beside_speculators_with_the_same_sources() -> None:
    bench = Bench()
    here = bench.desk.attach("here", ("ngram",), Outbox(), wants_top_tokens=False, is_colocated=True)
    there, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    assert here.sequences == there.sequences == {1: sequence}
    assert bench.desk.speculators == (there,), "nobody counts it as a speculator"


def test_what_drafts_here_must_pay_for_each_sequence() -> None:
    """It draws one tree after the other, and every step waits for all of them."""
    bench = Bench()
    here = bench.desk.attach("here", ("ngram",), Outbox(), wants_top_tokens=False, is_colocated=True)
    there, _ = bench.attach("ssm")
    for speculator in (here, there):
        speculator.latency_s = speculator.tree_s = 0.0008
        speculator.saves = 0.5
    for _ in range(4):
        bench.open(make_sequence())
    assert (here.eager, there.eager) == (0, 4), (
        "0.5 tokens at half of 4 ms are worth 1 ms, of which it takes 0.8 each time"
    )


def test_asking_for_several_at_once_pays_where_it_does_not_for_one() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    speculator.latency_s = speculator.tree_s = 0.002
    speculator.saves = 0.7
    sequences = [bench.open(make_sequence()) for _ in range(2)]
    assert speculator.eager == 0
    sequences += [bench.open(make_sequence()) for _ in range(2)]
    assert speculator.eager == 4


def test_a_fresh_sequence_is_not_even_read_where_trees_do_not_pay() -> None:
    bench = Bench()
    speculator, box = bench.attach("ngram")
    speculator.latency_s = speculator.tree_s = 0.02
    speculator.saves = 0.5
    sequence = bench.open(make_sequence())
    assert (speculator.eager, speculator.asked, box.assigned) == (0, {}, {})
    assert not bench.desk.wants_top_tokens(sequence)
    bench.waits(sequence)
    bench.advance(sequence, 10)
    assert len(speculator.asked) == 1, "but it is asked once, or nobody would learn that things have changed"


@pytest.mark.parametrize("held_up", [1, 2, 3])
def test_first_trees_that_took_long_do_not_keep_others_from_being_asked_for(held_up: int) -> None:
    """What is met for the first time takes longer: a table that has to be read, code that was never run."""
    bench = Bench()
    speculator, box = bench.attach("ngram")
    sequence = bench.open(make_sequence(max_tokens=1000))
    trees = 0
    for position in range(300):
        if speculator.asked:
            trees += 1
            bench.now += 0.2 if trees <= held_up else 0.0005
            tree = DraftProposal(len(sequence.tokens), TokenTree.chain((sequence.tokens[-1], 500 + position)))
            bench.desk.propose(speculator, 1, tree)
        bench.now += 0.005
        bench.waits(sequence)
        bench.advance(sequence, 500 + position, 700 + position)
    assert len(box.commits) > 100, "each tree saves a token, and none but the first took long"
