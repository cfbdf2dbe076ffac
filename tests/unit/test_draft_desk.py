"""The draft desk: who drafts for whom, which trees count, and how long a step waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from support.sequences import make_sequence

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_verifier.drafting import CommitNotice, DraftDesk, Speculator
from treeserve_verifier.sequence import Sequence

MAX_WAIT_S = 0.01


@dataclass
class Outbox:
    """Records what a speculator is told."""

    assigned: dict[int, Sequence] = field(default_factory=dict)
    commits: list[CommitNotice] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        self.assigned[handle] = sequence

    def commit(self, notice: CommitNotice) -> None:
        self.commits.append(notice)

    def release(self, handle: int) -> None:
        self.released.append(handle)


class Bench:
    """A desk on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.budget = 4
        self.desk = DraftDesk(lambda: self.now, MAX_WAIT_S, lambda sequence: self.budget)

    def attach(self, *sources: str, wants_top_tokens: bool = False) -> tuple[Speculator, Outbox]:
        outbox = Outbox()
        return self.desk.attach("s", sources, outbox, wants_top_tokens=wants_top_tokens), outbox

    def advance(self, sequence: Sequence, *tokens: int) -> None:
        base = len(sequence.tokens)
        sequence.tokens.extend(tokens)
        self.desk.committed(sequence, base, tuple((t,) for t in tokens))


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


def test_waiting_adapts_and_gives_up_on_a_silent_speculator() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    assert bench.desk.wait_until(sequence) <= bench.now, "nobody drafts for it"
    bench.desk.open(sequence)
    assert bench.desk.wait_until(sequence) == bench.now + MAX_WAIT_S
    bench.now += 0.001
    bench.desk.propose(speculator, 1, _chain(sequence, 7))
    assert bench.desk.wait_until(sequence) <= bench.now, "the tree is here"
    for _ in range(3):
        bench.advance(sequence, 7)
        assert bench.desk.wait_until(sequence) > bench.now
        bench.now += 0.05
    bench.advance(sequence, 7)
    assert not speculator.responsive
    assert bench.desk.wait_until(sequence) <= bench.now
    bench.now += 0.001
    bench.desk.propose(speculator, 1, _chain(sequence, 7))
    assert speculator.responsive, "a tree in time is forgiven"


def test_a_silent_speculator_is_given_up_on_however_fast_the_steps_are() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    bench.now += 0.0001
    bench.desk.propose(speculator, 1, _chain(sequence, 7))
    for _ in range(4):  # wait as long as it is told, then a step of half a millisecond: together less than MAX_WAIT_S
        bench.advance(sequence, 7)
        bench.now = bench.desk.wait_until(sequence) + 0.0005
    assert not speculator.responsive
    assert bench.desk.wait_until(sequence) <= bench.now


def test_a_pause_counts_once_however_many_sequences_it_hits() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequences = [make_sequence() for _ in range(5)]
    for sequence in sequences:
        bench.desk.open(sequence)
    for _ in range(2):
        bench.now += 0.05
        for sequence in sequences:
            bench.advance(sequence, 7)
    assert speculator.responsive and speculator.misses == 2


def test_the_wait_grows_with_answers_that_come_late() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.desk.open(sequence)
    bench.now += 0.0001
    bench.desk.propose(speculator, 1, _chain(sequence, 7))
    for _ in range(6):  # from now on a tree takes 4 ms, and a step that waits no longer half a millisecond
        bench.advance(sequence, 7)
        arrives, tree = bench.now + 0.004, _chain(sequence, 7)
        bench.now = bench.desk.wait_until(sequence) + 0.0005
        if bench.now < arrives:
            bench.advance(sequence, 8)
            bench.now = arrives
            with pytest.raises(StaleBaseError):
                bench.desk.propose(speculator, 1, tree)
    bench.advance(sequence, 7)
    assert speculator.responsive
    assert bench.desk.wait_until(sequence) > bench.now + 0.004


def test_nobody_waits_for_a_tree_that_was_not_asked_for() -> None:
    bench = Bench()
    speculator, _ = bench.attach("ngram")
    sequence = make_sequence()
    bench.budget = 0
    bench.desk.open(sequence)
    for _ in range(5):
        assert bench.desk.wait_until(sequence) <= bench.now
        bench.now += 0.05
        bench.advance(sequence, 7)
    assert speculator.responsive


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
