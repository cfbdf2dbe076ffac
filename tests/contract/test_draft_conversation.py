"""A Draft stream from the speculator's side: trees for assignments and commits, credit, and what is malformed."""

from __future__ import annotations

import asyncio
import math
import random
import threading

import pytest
from google.rpc import code_pb2
from support.draft_rig import (
    TIMEOUT_S,
    VOCAB,
    DraftVerifier,
    ScriptedSource,
    StartSpeculator,
    assignment,
    commit,
    next_tokens,
)
from support.waiting import until

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import StaleBaseError
from treeserve_core.tree import TokenTree
from treeserve_speculator.conversation import CREDIT_WINDOW
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.ngram import NgramSource
from treeserve_speculator.sources.recycling import RecyclingSource
from treeserve_speculator.sources.suffix import SuffixSource
from treeserve_wire.draft_codec import proposal_from_proto
from treeserve_wire.status import to_status


async def test_assignment_and_commits_are_answered_by_trees(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    source = ScriptedSource(next_tokens)
    speculator = start_speculator(source)
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5, 6]), assignment(2, [8], budget=0), assignment(3, [20])])
    trees = await stream.proposals()
    assert {handle: list(p.token_ids) for handle, p in trees.items()} == {1: [6, 7, 8, 9], 3: [20, 21, 22, 23]}
    assert trees[1].base_committed_len == 2 and list(trees[1].parents) == [-1, 0, 1, 2]
    assert list(trees[1].source_masks) == [0, 1, 1, 1] and len(trees[1].log_probs) == 4

    top = [verifier_pb2.TopTokens(token_ids=[7, 40]), verifier_pb2.TopTokens(token_ids=[30])]
    await stream.update(commits=[commit(1, 2, [7, 30], budget=1, top_tokens=top), commit(2, 1, [9], budget=2)])
    trees = await stream.proposals()
    assert {handle: list(p.token_ids) for handle, p in trees.items()} == {1: [30, 31], 2: [9, 10, 11]}
    assert trees[1].base_committed_len == 4
    assert ((7, 40), (30,)) in source.top_tokens
    assert speculator.count("sequences") == 3


async def test_released_sequences_are_forgotten(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    speculator = start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5]), assignment(2, [5])])
    await stream.proposals()
    await stream.update(released=[1, 77])
    await stream.update(commits=[commit(1, 1, [6]), commit(2, 1, [6])])
    assert list(await stream.proposals()) == [2]
    assert speculator.count("sequences") == 1 and speculator.count("protocol_errors_total") == 0


async def test_no_idea_is_answered_by_a_root_alone(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(ScriptedSource(lambda state, budget: None))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5])])
    assert list((await stream.proposals())[1].token_ids) == [5]


@pytest.mark.parametrize(("max_nodes", "max_depth", "expected"), [(33, 2, [5, 6, 7]), (4, 9, [5, 6, 7, 8])])
async def test_verifier_limits_bound_every_tree(
    draft_verifier: DraftVerifier,
    start_speculator: StartSpeculator,
    max_nodes: int,
    max_depth: int,
    expected: list[int],
) -> None:
    start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome(max_nodes=max_nodes, max_depth=max_depth)
    await stream.update(assignments=[assignment(1, [5], budget=30)])
    assert list((await stream.proposals())[1].token_ids) == expected


async def test_prices_bound_trees_until_others_come(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    sizes = []
    for handle, price in enumerate((None, 0.7, None, 0.0)):
        prices = {} if price is None else {"prices": verifier_pb2.DraftPrices(token_us=4000.0, node=price)}
        await stream.update(assignments=[assignment(handle, [5], budget=8)], **prices)
        sizes.append(len((await stream.proposals())[handle].token_ids) - 1)
    assert sizes[0] == sizes[3] == 8 > sizes[1] == sizes[2]


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
async def test_what_is_no_price_ends_the_stream(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator, price: float
) -> None:
    start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5])], prices=verifier_pb2.DraftPrices(token_us=price))
    stream.end()
    await draft_verifier.next_stream()


async def test_credit_is_given_back_as_updates_are_processed(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome(credit=1000)
    await stream.update(assignments=[assignment(1, [5])])
    await stream.proposals()
    for base in range(1, CREDIT_WINDOW + 1):
        await stream.update(commits=[commit(1, base, [5])])
        await stream.proposals()
    assert CREDIT_WINDOW // 2 <= stream.credit <= CREDIT_WINDOW + 1


async def test_without_credit_only_the_newest_tree_waits(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    source = ScriptedSource(next_tokens)
    start_speculator(source)
    stream = await draft_verifier.next_stream()
    await stream.welcome(credit=1)
    await stream.update(assignments=[assignment(1, [5]), assignment(2, [50])])
    assert set(await stream.proposals()) == {1, 2}
    await stream.update(commits=[commit(1, 1, [6])])
    await stream.update(commits=[commit(1, 2, [30])])
    await stream.update(commits=[commit(2, 1, [60])])
    await until(lambda: {(1, 3), (2, 2)} <= source.drawn)  # and none may be sent
    await stream.send(credit=verifier_pb2.Credit(frames=5))
    trees = await stream.proposals()
    assert {h: (p.base_committed_len, list(p.token_ids)) for h, p in trees.items()} == {
        1: (3, [30, 31, 32, 33]),
        2: (2, [60, 61, 62, 63]),
    }
    await stream.update(commits=[commit(1, 3, [31])])
    assert set(await stream.proposals()) == {1}, "each tree was sent once"


class GatedSource(ScriptedSource):
    """Blocks in its first `propose` until the test lets it go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        super().__init__(self._gated)

    def _gated(self, state: DraftSequence, budget: int) -> TokenTree:
        self.entered.set()
        assert self.go_on.wait(TIMEOUT_S)
        return next_tokens(state, budget)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, TIMEOUT_S)


async def test_commits_that_arrive_while_drafting_move_the_tree_along(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    source = GatedSource()
    speculator = start_speculator(source)
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(handle, [start]) for handle, start in enumerate((5, 50, 70, 30), 1)])
    await source.wait_entered()
    # along its tree, away from it, gone, and along all of it: an empty tree would only get in the way of the next
    commits = [commit(1, 1, [6]), commit(2, 1, [90]), commit(4, 1, [31, 32, 33])]
    await stream.update(commits=commits, released=[3])
    rejection = verifier_pb2.Rejection(handle=1, status=to_status(StaleBaseError("late")))
    await stream.send(rejections=verifier_pb2.Rejections(rejections=[rejection]))
    # the stream is read while the source is busy
    await until(lambda: speculator.count("rejections_total", code="FAILED_PRECONDITION") == 1)
    source.go_on.set()
    stale = await stream.proposals()
    assert {h: (p.base_committed_len, list(p.token_ids)) for h, p in stale.items()} == {1: (2, [6, 7, 8])}
    assert speculator.count("late_trees_total") == 3
    fresh = await stream.proposals()
    assert {h: p.token_ids[0] for h, p in fresh.items()} == {1: 6, 2: 90, 4: 33}


async def test_waiting_trees_that_nobody_wants_any_more_are_not_sent(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    source = ScriptedSource(next_tokens)
    speculator = start_speculator(source)
    stream = await draft_verifier.next_stream()
    await stream.welcome(credit=1)
    await stream.update(assignments=[assignment(9, [1])])
    await stream.proposals()
    await stream.update(assignments=[assignment(handle, [5]) for handle in (1, 2, 3)])
    await until(lambda: {(1, 1), (2, 1), (3, 1)} <= source.drawn)  # and wait for credit
    await stream.update(commits=[commit(1, 1, [6], budget=0)], released=[2])
    await stream.send(credit=verifier_pb2.Credit(frames=1))
    assert set(await stream.proposals()) == {3}
    assert speculator.count("late_trees_total") == 2


async def test_a_commit_out_of_step_drops_its_sequence_alone(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    speculator = start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5]), assignment(2, [50])])
    await stream.proposals()
    await stream.update(commits=[commit(1, 7, [6]), commit(2, 1, [51])])
    assert set(await stream.proposals()) == {2}
    await stream.update(commits=[commit(1, 1, [6]), commit(2, 2, [52])])
    assert set(await stream.proposals()) == {2}
    assert speculator.count("protocol_errors_total") == 1


MALFORMED = {
    "no tokens": assignment(1, []),
    "padding id": assignment(1, [VOCAB]),
    "prompt longer than all": verifier_pb2.Assignment(handle=1, token_ids=[5], prompt_tokens=2, budget=3),
    "impossible temperature": verifier_pb2.Assignment(
        handle=1, token_ids=[5], budget=3, sampling={"temperature": -1.0}
    ),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_assignment_harms_no_other(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator, malformed: verifier_pb2.Assignment
) -> None:
    speculator = start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[malformed, assignment(2, [50])])
    assert set(await stream.proposals()) == {2}
    await stream.update(commits=[commit(1, 1, [5]), commit(2, 1, [VOCAB]), commit(3, 1, [5])])
    await stream.update(assignments=[assignment(4, [50])])
    assert set(await stream.proposals()) == {4}
    assert speculator.count("protocol_errors_total") == 2 and speculator.count("sequences") == 1


async def test_rejections_are_counted(draft_verifier: DraftVerifier, start_speculator: StartSpeculator) -> None:
    speculator = start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    refused = verifier_pb2.Rejection(handle=1)
    refused.status.code = code_pb2.FAILED_PRECONDITION
    await stream.send(rejections=verifier_pb2.Rejections(rejections=[refused, refused]))
    await stream.update(assignments=[assignment(1, [5])])
    await stream.proposals()
    assert speculator.count("rejections_total", code="FAILED_PRECONDITION") == 2


async def test_real_sources_send_valid_trees_over_a_long_life(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(NgramSource(), SuffixSource(), RecyclingSource(VOCAB))
    stream = await draft_verifier.next_stream()
    await stream.welcome(credit=10_000, max_nodes=9, max_depth=4)
    rng = random.Random(7)
    tokens = {handle: [rng.randrange(6) for _ in range(12)] for handle in range(1, 6)}
    await stream.update(assignments=[assignment(handle, ids, budget=8) for handle, ids in tokens.items()])
    drafted_by = 0
    for _ in range(60):
        for handle, message in (await stream.proposals()).items():
            proposal = proposal_from_proto(message, vocab_size=VOCAB, max_nodes=9, max_depth=4, num_sources=3)
            assert proposal.rebased(tokens[handle]) == proposal.tree
            for mask in proposal.tree.source_masks or ():
                drafted_by |= mask
        commits = []
        for handle, ids in tokens.items():
            new = [rng.randrange(6) for _ in range(rng.randrange(1, 4))]
            top = [verifier_pb2.TopTokens(token_ids=rng.sample(range(6), 4)) for _ in new]
            commits.append(commit(handle, len(ids), new, budget=8, top_tokens=top))
            ids.extend(new)
        await stream.update(commits=commits)
    assert drafted_by == 0b111
