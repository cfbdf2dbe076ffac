"""A proposal meets a prefix that has moved on: it is re-rooted along what was committed, or it is stale."""

from __future__ import annotations

import pytest

from treeserve_core.errors import HandshakeError, StaleBaseError
from treeserve_core.identity import PROTOCOL_VERSION, ModelIdentity, check_protocol
from treeserve_core.outcome import SpeculationStats
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree

#        30 (root, committed at index 2)
#       /  \
#     40    41
#    /  \     \
#  50   51     50
TREE = TokenTree((30, 40, 41, 50, 51, 50), (-1, 0, 0, 1, 1, 2))
PROPOSAL = DraftProposal(base_committed_len=3, tree=TREE)


def test_a_fresh_base_leaves_the_tree_alone() -> None:
    assert PROPOSAL.rebased([10, 20, 30]) is TREE


def test_rerooting_along_the_tokens_committed_since() -> None:
    assert PROPOSAL.rebased([10, 20, 30, 40]) == TokenTree((40, 50, 51), (-1, 0, 0))
    assert PROPOSAL.rebased([10, 20, 30, 41]) == TokenTree.chain([41, 50])
    assert PROPOSAL.rebased([10, 20, 30, 40, 51]) == TokenTree.root_only(51)


def test_applying_the_same_proposal_twice_gives_the_same_tree() -> None:
    committed = [10, 20, 30, 40]
    assert PROPOSAL.rebased(committed) == PROPOSAL.rebased(committed)


@pytest.mark.parametrize(
    ("committed", "reason"),
    [
        ([10, 20], "does not fit"),
        ([], "does not fit"),
        ([10, 20, 31], "root 30 is not"),
        ([10, 20, 30, 42], "not in the tree"),
        ([10, 20, 30, 40, 52], "not in the tree"),
        ([10, 20, 30, 40, 50, 60], "not in the tree"),
    ],
)
def test_stale_bases(committed: list[int], reason: str) -> None:
    with pytest.raises(StaleBaseError, match=reason):
        PROPOSAL.rebased(committed)


def test_a_base_of_zero_is_stale() -> None:
    with pytest.raises(StaleBaseError):
        DraftProposal(0, TREE).rebased([10, 20, 30])


IDENTITY = ModelIdentity("m", "ab12", 100, 128, (2, 5))


def test_a_peer_may_differ_in_padding_only() -> None:
    roles = {"own_role": "verifier", "peer_role": "speculator"}
    IDENTITY.check_peer(ModelIdentity("m", "ab12", 100, 100, (2, 5)), **roles)
    for other in (
        ModelIdentity("n", "ab12", 100, 128, (2, 5)),
        ModelIdentity("m", "ab13", 100, 128, (2, 5)),
        ModelIdentity("m", "ab12", 101, 128, (2, 5)),
        ModelIdentity("m", "ab12", 100, 128, (2,)),
    ):
        with pytest.raises(HandshakeError, match="differs: the verifier has"):
            IDENTITY.check_peer(other, **roles)


def test_protocol_version() -> None:
    check_protocol(PROTOCOL_VERSION)
    with pytest.raises(HandshakeError):
        check_protocol(PROTOCOL_VERSION + 1)


def test_speculation_stats_add_up() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_length == 0.0
    stats.record(drafted=5, accepted=2)
    stats.record(drafted=0, accepted=0)
    stats.record(drafted=4, accepted=3)
    assert (stats.steps, stats.drafted, stats.accepted) == (3, 9, 5)
    assert stats.accepted_per_depth == [2, 2, 1]
    assert sum(stats.accepted_per_depth) == stats.accepted
    assert stats.acceptance_length == pytest.approx(8 / 3)
    longer = SpeculationStats(steps=1, drafted=6, accepted=4, accepted_per_depth=[1, 1, 1, 1])
    stats.add(longer)
    assert stats == SpeculationStats(steps=4, drafted=15, accepted=9, accepted_per_depth=[3, 3, 2, 1])
    assert longer.accepted_per_depth == [1, 1, 1, 1]
