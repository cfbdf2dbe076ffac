"""The draft desk: who drafts for whom, which trees count, and how long a step waits."""

from __future__ import annotations

import pytest
from support.draft_bench import MAX_WAIT_S, UNANSWERED, Bench, Outbox, chain
from support.sequences import make_sequence

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_verifier.cost_model import Prices


def test_a_tree_is_offered_until_it_does_not_fit() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    assert bench.desk.tree(sequence) is None
    bench.desk.propose(speculator, 1, chain(sequence, 7, 8, 9))
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


def test_a_tree_of_a_speculator_that_left_is_dropped() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    bench.desk.detach(speculator)
    assert bench.desk.propose(speculator, 1, chain(sequence, 7)) is None
    assert bench.desk.tree(sequence) is None


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
        bench.desk.propose(speculator, 9, chain(sequence, 7))
    with pytest.raises(StaleBaseError):
        bench.desk.propose(speculator, 1, DraftProposal(2, TokenTree.chain((2, 50))))
    with pytest.raises(StaleBaseError):
        bench.desk.propose(speculator, 1, DraftProposal(4, TokenTree.chain((3, 7))))
    assert bench.desk.tree(sequence) is None
    bench.desk.close(sequence)
    assert bench.desk.propose(speculator, 1, chain(sequence, 7)) is None, "a race with the end is not an error"


def test_a_reordered_older_tree_does_not_replace_a_newer_one() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    older = chain(sequence, 7, 1)
    bench.advance(sequence, 7)
    bench.desk.propose(speculator, 1, chain(sequence, 8))
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
    assert bench.waits(sequence) == pytest.approx(0.0036), "a new sequence's tree: one token, less the price of a row"
    bench.now += 0.001
    bench.desk.propose(speculator, 1, chain(sequence, 7, 8))
    assert bench.waits(sequence) == 0.0, "the tree is here"
    assert speculator.latency_s == pytest.approx(0.001)
    bench.advance(sequence, 7, 8, 9)
    expected_s = 0.004 * (0.9 + (2 - 0.9) / 3)
    assert bench.waits(sequence) == pytest.approx(expected_s)
    speculator.latency_s = expected_s / 1.5 + 1e-6
    assert bench.waits(sequence) == 0.0, "it takes too long for what it is worth"
    speculator.latency_s = 0.001
    bench.prices = Prices(token_s=0.1, row=0.1)
    assert bench.waits(sequence) == pytest.approx(MAX_WAIT_S)


def test_what_waiting_costs_all_is_weighed_against_what_the_trees_bring_together() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequences = [bench.open(make_sequence()) for _ in range(2)]
    speculator.latency_s = 0.0045
    assert bench.waits(sequences[0]) == 0.0, "one tree saves 3.6 ms"
    assert bench.waits(*sequences) == pytest.approx(0.0072)
    bench.now += 0.0045
    bench.desk.propose(speculator, 1, chain(sequences[0], 7))
    assert bench.waits(*sequences) == 0.0, "only one is missing now"


def test_a_tree_at_hand_is_not_waited_for_again() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    bench.desk.propose(speculator, 1, chain(sequence, 7, 8, 9))
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
    bench.desk.propose(speculator, 1, chain(sequence, 7))
    bench.advance(sequence, 7, 8)
    assert bench.waits(sequence) > 0.0, "it answers again"


def test_one_late_answer_hardly_counts_and_a_slow_speculator_is_not_waited_for() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = bench.open(make_sequence())
    for latency_s in (0.001, 0.02, 0.001):
        bench.now += latency_s
        bench.desk.propose(speculator, 1, chain(sequence, 7))
        bench.advance(sequence, 7, 8)
    assert speculator.latency_s < 0.0025 and bench.waits(sequence) > 0.0
    for _ in range(10):
        bench.now += 0.02
        bench.desk.propose(speculator, 1, chain(sequence, 7))
        bench.advance(sequence, 7, 8)
    assert bench.waits(sequence) == 0.0


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


def test_what_drafts_here_stands_beside_speculators_with_the_same_sources() -> None:
    bench = Bench()
    here = bench.desk.attach("here", ("ngram",), Outbox(), wants_top_tokens=False, is_colocated=True)
    there, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    assert here.sequences == there.sequences == {1: sequence}
    assert bench.desk.speculators == (there,), "nobody counts it as a speculator"
