"""Prompt lookup: longest and latest match wins, the chain is what followed, the index grows with the sequence."""

from __future__ import annotations

import math

import pytest

from treeserve_core.sampling import SamplingParams
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.ngram import NgramSource


def _opened(source: NgramSource, tokens: list[int]) -> DraftSequence:
    state = DraftSequence(1, list(tokens), len(tokens), SamplingParams(), 8)
    source.open(state)
    return state


def _proposed(tokens: list[int], budget: int = 4, **options: int) -> list[int] | None:
    source = NgramSource(**options)
    tree = source.propose(_opened(source, tokens), budget)
    if tree is None:
        return None
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    assert tree.token_ids[0] == tokens[-1]
    return list(tree.token_ids[1:])


def test_copies_what_followed_the_match() -> None:
    assert _proposed([1, 2, 3, 4, 5, 9, 2, 3], budget=3) == [4, 5, 9]


def test_latest_match_wins() -> None:
    assert _proposed([7, 1, 7, 2, 7], budget=1) == [2]


def test_longer_match_beats_a_later_shorter_one() -> None:
    assert _proposed([1, 2, 30, 9, 2, 40, 1, 2], budget=1) == [30]


def test_no_match_no_tree() -> None:
    assert _proposed([1, 2, 3]) is None
    assert _proposed([1]) is None


def test_shortest_match_is_a_limit() -> None:
    assert _proposed([7, 1, 7], min_match=2) is None
    assert _proposed([7, 1, 7], min_match=1) is not None


def test_match_that_reaches_the_end_repeats_itself() -> None:
    assert _proposed([5, 6, 5, 6], budget=5) == [5, 6, 5, 6, 5]


def test_length_is_bounded() -> None:
    assert len(_proposed([*range(50), 0], budget=100, max_length=10) or ()) == 10


def test_commits_are_indexed_as_if_known_from_the_start() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 2, 3, 1, 2, 3, 3, 1, 2]
    source = NgramSource()
    state = _opened(source, tokens[:3])
    for end, start in ((4, 3), (8, 4), (len(tokens), 8)):
        state.tokens.extend(tokens[start:end])
        source.commit(state, tokens[start:end], [])
        fresh = NgramSource()
        assert source.propose(state, 8) == fresh.propose(_opened(fresh, tokens[:end]), 8)


@pytest.mark.parametrize("tokens", [[7, 1, 8, 7], [6, 7, 1, 8, 6, 7], [4, 5, 6, 7, 1, 8, 4, 5, 6, 7]])
def test_estimates_are_probabilities_that_rise_along_the_chain(tokens: list[int]) -> None:
    source = NgramSource()
    tree = source.propose(_opened(source, tokens), 3)
    assert tree is not None and tree.log_probs is not None
    assert list(tree.log_probs[1:]) == sorted(tree.log_probs[1:])


def test_longer_match_is_trusted_more() -> None:
    def first_estimate(tokens: list[int]) -> float:
        source = NgramSource()
        tree = source.propose(_opened(source, tokens), 1)
        assert tree is not None and tree.log_probs is not None
        return math.exp(tree.log_probs[1])

    assert first_estimate([7, 1, 8, 7]) < first_estimate([6, 7, 1, 8, 6, 7]) < 1


def test_close_forgets() -> None:
    source = NgramSource()
    state = _opened(source, [1, 2, 1])
    source.close(state)
    assert state.source_state == {}
