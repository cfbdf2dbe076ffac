"""Whom speculators are asked for: who pays is asked at every step, others now and then, and nobody in vain for long."""

from __future__ import annotations

import itertools

import pytest
from support.draft_bench import Bench, Outbox, chain
from support.sequences import make_sequence

from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree
from treeserve_verifier.cost_model import Prices


def test_asks_become_rare_while_trees_fail_and_carry_all_tokens() -> None:
    bench = Bench()
    speculator, box = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    asked_at = []
    for position in range(400):
        bench.now += 0.001
        if speculator.asked:
            bench.desk.propose(speculator, 1, chain(sequence, 77))
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
    bench.desk.propose(speculator, 1, chain(sequence, 7, 8, 9, 10))
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
            bench.desk.propose(speculator, handle, chain(sequence, 77))
        bench.waits(sequence)
        due, before = bench.desk.tokens_until_ask(sequence), len(box.commits)
        bench.advance(sequence, 1000 + position)
        assert len(box.commits) == before or due == 1, "nothing is asked for unannounced"
        seen.add((due == 1, len(box.commits) > before))
    assert seen >= {(True, True), (False, False)}


def test_many_sequences_without_luck_are_tried_in_turn_and_more_seldom_than_one() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequences = [bench.open(make_sequence()) for _ in range(8)]
    asked: list[int] = []
    asked_late, half_s = 0, bench.now + 10.0
    for step in range(4000):
        bench.now += 0.001
        for handle in list(speculator.asked):
            asked.append(handle)
            asked_late += bench.now > half_s
            sequence = speculator.sequences[handle]
            bench.desk.propose(speculator, handle, DraftProposal(len(sequence.tokens), chain(sequence, 77).tree))
        bench.waits(*sequences)
        for i, sequence in enumerate(sequences):
            bench.advance(sequence, 1000 + 8 * step + i)
        bench.now += 0.004
    tried = asked[-16:]
    assert sorted(tried) == sorted([*range(1, 9), *range(1, 9)]), "in turn"
    assert len(asked) < 20.0 * 0.01 / 0.0015 + 8 * 12, "a hundredth of 20 s, and the trees before that was known"
    assert 0 < asked_late <= 10.0 * 0.01 / 0.0015 / 8 + 1, "each holds up eight"


def test_a_sequence_that_repeats_itself_is_found_without_asking() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram", wants_top_tokens=True)
    speculator.latency_s = speculator.tree_s = 0.002
    speculator.brings = 0.0
    speculator.probe_at = 1e9
    sequence = bench.open(make_sequence(tuple(range(10, 60)), max_tokens=200))
    bench.waits(sequence)
    for token in range(500, 520):
        bench.advance(sequence, token)
    assert bench.eager(speculator) == 0 and not bench.desk.wants_top_tokens(sequence)
    repeated = 0
    while bench.eager(speculator) == 0:
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
            bench.desk.propose(speculator, 1, chain(sequence))
        assert bench.waits(sequence) == 0.0 and bench.desk.tree(sequence) is None
        bench.advance(sequence, 7)
        seen.append(bench.waits(sequence))
    assert seen[0] > seen[1] > seen[2] > 0.0


def test_pruned_nodes_and_nodes_that_cost_what_they_save_are_worth_nothing() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    right, pruned, costly = (bench.open(make_sequence()) for _ in range(3))
    for handle, sequence in enumerate((right, pruned, costly), start=1):
        bench.desk.propose(speculator, handle, chain(sequence, 7, 8, 9))
    bench.advance(right, 7, 8, 9, 10)
    for token in (7, 8, 9):  # each is the bonus token of a step that used none of the tree's nodes
        bench.advance(pruned, token)
    bench.advance(costly, 7, 8, 9, 10, spent=3.0)
    worth = [bench.desk.wait_until([s]) - speculator.silent_since for s in (right, costly)]
    # A new sequence's tree is expected to save a token less the price of a row, 0.1, which counts as two trees.
    assert worth == pytest.approx([0.004 * (1.8 + 3.0) / 3, 0.004 * 1.8 / 3])
    assert bench.desk._seats[pruned][0].pace.saves == pytest.approx(1.8 / 3)


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


def test_a_tree_is_credited_with_what_no_quicker_one_had() -> None:
    bench = Bench()
    (quick, _), (slow, _) = bench.attach("ngram"), bench.attach("ssm")
    sequence = bench.open(make_sequence())
    for _ in range(40):
        for speculator, seconds in ((quick, 0.0005), (slow, 0.0015)):
            bench.now += seconds
            if 1 in speculator.asked:
                bench.desk.propose(speculator, 1, chain(sequence, 7, 8))
        bench.advance(sequence, 7, 8, 9)
    assert (bench.eager(quick), bench.eager(slow)) == (1, 0), "the slow one had nothing that the quick one had not"
    for _ in range(400):  # it is tried now and then
        bench.waits(sequence)
        for speculator, seconds, tokens in ((quick, 0.0005, (7,)), (slow, 0.0015, (7, 8, 9, 10))):
            bench.now += seconds
            if 1 in speculator.asked:
                bench.desk.propose(speculator, 1, chain(sequence, *tokens))
        bench.advance(sequence, 7, 8, 9, 10, 11)
    assert (bench.eager(quick), bench.eager(slow)) == (1, 1), "three of its four tokens were its own"


def test_what_drafts_here_must_pay_for_each_sequence() -> None:
    """It draws one tree after the other, and every step waits for all of them."""
    bench = Bench()
    here = bench.desk.attach("here", ("ngram",), Outbox(), wants_top_tokens=False, is_colocated=True)
    there, _ = bench.attach("ssm")
    for speculator, tree_s in ((here, 0.0024), (there, 0.0008)):
        speculator.latency_s = speculator.tree_s = tree_s
        speculator.brings = 0.5
    for _ in range(4):
        bench.open(make_sequence())
    assert (bench.eager(here), bench.eager(there)) == (0, 4), (
        "0.45 tokens at half of 4 ms are worth 0.9 ms, and what it takes each time counts 1.5 times"
    )
    here.tree_s = 0.00055
    bench.open(make_sequence())
    assert bench.eager(here) == 5


def test_asking_for_several_at_once_pays_where_it_does_not_for_one() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    speculator.latency_s = speculator.tree_s = 0.002
    speculator.brings = 0.7
    sequences = [bench.open(make_sequence()) for _ in range(2)]
    assert bench.eager(speculator) == 0
    sequences += [bench.open(make_sequence()) for _ in range(2)]
    assert bench.eager(speculator) == 4


def test_a_fresh_sequence_is_not_even_read_where_trees_do_not_pay() -> None:
    bench = Bench()
    speculator, box = bench.attach("ngram")
    speculator.latency_s = speculator.tree_s = 0.02
    speculator.brings = 0.5
    sequence = bench.open(make_sequence())
    assert (bench.eager(speculator), speculator.asked, box.assigned) == (0, {}, {})
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


def test_what_trees_usually_bring_is_learned_whatever_rows_cost() -> None:
    """Sequences that run beside many others, where rows are dear, must not make a lone one expect nothing."""
    bench = Bench()
    bench.prices = Prices(token_s=0.004, row=0.9)
    speculator, _ = bench.attach("ngram")
    speculator.brings = 0.0
    sequence = bench.open(make_sequence())
    speculator.probe_at = 0.0
    bench.waits(sequence)
    bench.advance(sequence, 5)
    bench.desk.propose(speculator, 1, chain(sequence, 7))
    bench.advance(sequence, 7, 8, spent=0.9)
    assert speculator.brings == pytest.approx(0.05)


def test_a_tree_without_a_node_cost_the_turn_of_the_loop_that_brought_it() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    empty, wrong = bench.open(make_sequence()), bench.open(make_sequence())
    bench.desk.propose(speculator, 1, chain(empty))
    bench.desk.propose(speculator, 2, chain(wrong, 77))
    bench.advance(wrong, 7)
    paces = [bench.desk._seats[sequence][0].pace.saves for sequence in (empty, wrong)]
    assert paces == pytest.approx([(1.8 - 0.001 / (0.004 * 2)) / 3, 1.8 / 3]), "a turn of 1 ms, of steps of 8 ms"


def test_a_tree_without_a_node_costs_no_older_tree_anything() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    bench.desk.propose(speculator, 1, chain(sequence, 7, 8, 9))
    bench.advance(sequence, 7)
    before = bench.desk._seats[sequence][0].pace._saved
    assert speculator.asked
    bench.desk.propose(speculator, 1, chain(sequence))
    assert bench.desk._seats[sequence][0].pace._saved == before
