"""Which draft nodes are chosen: what is needed first, then what pays, and never more than there is room for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.selection import Offer, RatedNode, Selection

STEEP = CostModel({rows: 5.0 + 0.5 * rows for rows in range(1, 129)})


def chain(*f: float) -> list[RatedNode]:
    return [(-each, depth, 0, depth, depth) for depth, each in enumerate(f, start=1)]


def select(offers: Sequence[Offer], cost: CostModel) -> Selection:
    """Of these offers, in which every node knows its place."""
    return Selection(
        [offer._replace(nodes=[(*n[:2], i, *n[3:]) for n in offer.nodes]) for i, offer in enumerate(offers)], cost
    )


def chosen(*offers: Offer, cost: CostModel = STEEP, room: int = 100) -> list[int]:
    selection = select(offers, cost)
    selection.choose(room)
    return selection.counts


f_values = st.lists(st.integers(1, 100), max_size=8)
nodes = f_values.map(lambda f: chain(*(each / 100 for each in sorted(f, reverse=True))))
promised = st.builds(
    lambda nodes, slack_ms, token_ms, tokens_left: Offer(nodes, slack_ms, token_ms, tokens_left),
    nodes,
    st.integers(-200, 200).map(float),
    st.integers(2, 60).map(float),
    st.integers(1, 300),
)
unpromised = nodes.map(Offer)
costs = st.sampled_from(
    [
        STEEP,
        CostModel({1: 5.0, 4: 5.5, 8: 7.0, 16: 10.0, 32: 17.0}),
        CostModel({1: 10.0, 64: 10.0}),
        CostModel({3: 10.0, 6: 11.0, 9: 30.0, 40: 31.0}),
    ]
)


@given(st.lists(promised | unpromised, min_size=1, max_size=6), costs, st.integers(0, 12))
def test_there_is_never_more_than_room(offers: list[Offer], cost: CostModel, room: int) -> None:
    selection = select(offers, cost)
    selection.choose(room)
    assert sum(selection.counts) <= room
    for offer, count, expected in zip(offers, selection.counts, selection.expected, strict=True):
        assert 0 <= count <= len(offer.nodes)
        assert expected == pytest.approx(-sum(node[0] for node in offer.nodes[:count]))


@given(st.lists(unpromised, min_size=1, max_size=5), costs, st.integers(0, 12))
def test_without_targets_the_number_of_nodes_is_the_best_there_is(
    offers: list[Offer], cost: CostModel, room: int
) -> None:
    best = sorted((-node[0] for offer in offers for node in offer.nodes), reverse=True)[:room]
    rates = [(len(offers) + sum(best[:n])) / cost.step_ms(len(offers) + n) for n in range(len(best) + 1)]
    selection = select(offers, cost)
    selection.choose(room)
    rate = (len(offers) + sum(selection.expected)) / selection.step_ms
    assert rate == pytest.approx(max(rates))
    assert rate >= rates[0], "never slower than without"


@given(st.lists(promised | unpromised, min_size=1, max_size=6), costs, st.integers(0, 12))
def test_nobody_who_is_in_time_is_made_late_for_others(offers: list[Offer], cost: CostModel, room: int) -> None:
    selection = select(offers, cost)
    before_ms = selection.step_ms
    selection.choose(room)
    for offer, expected in zip(offers, selection.expected, strict=True):
        if math.inf > offer.slack_ms >= before_ms:
            assert offer.slack_ms + expected * offer.token_ms >= selection.step_ms - 1e-9


@given(st.lists(promised | unpromised, min_size=1, max_size=6), costs, st.integers(0, 12))
def test_a_faster_step_needs_less(offers: list[Offer], cost: CostModel, room: int) -> None:
    """Monotone: who has more slack is not given more in the first phase."""
    relaxed = [offer._replace(slack_ms=math.inf, token_ms=math.inf) for offer in offers]
    first, second = select(offers, cost), select(relaxed, cost)
    first._meet_targets(room)
    assert second._meet_targets(room) == 0
    assert all(
        count == 0
        for offer, count in zip(offers, first.counts, strict=True)
        if offer.slack_ms >= cost.step_ms(len(offers))
    )


def test_who_is_behind_gets_nodes_that_do_not_pay() -> None:
    cost = CostModel({8: 10.0, 16: 14.0})
    offer = Offer(chain(0.6, 0.5, 0.4), tokens_left=100)
    crowd = [Offer() for _ in range(7)]
    assert chosen(offer, *crowd, cost=cost) == [0] * 8, "1.5 tokens of eight for 40 % more time"
    late = offer._replace(slack_ms=2.0, token_ms=9.0)
    assert chosen(late, *crowd, cost=cost)[0] == 3
    in_time = offer._replace(slack_ms=15.0, token_ms=9.0)
    assert chosen(in_time, *crowd, cost=cost)[0] == 0


def test_the_fewest_nodes_that_bring_it_in_time() -> None:
    needs = 10.0 - 1.0  # of 10 ms a step, one of its tokens too few by 9 ms
    cost = CostModel({64: 10.0, 65: 1000.0})
    offer = Offer(chain(*[0.9] * 10), slack_ms=10.0 - needs, token_ms=9.0, tokens_left=100)
    crowd = [Offer(chain(0.95)) for _ in range(54)]
    assert chosen(offer, *crowd, cost=cost, room=9)[0] == 2, "0.9 is too little, 1.8 is enough"


def test_the_most_behind_comes_first() -> None:
    cost = CostModel({2: 10.0, 16: 10.0, 17: 1000.0})
    a = Offer(chain(*[0.5] * 8), slack_ms=-20.0, token_ms=10.0, tokens_left=100)
    b = Offer(chain(*[0.5] * 8), slack_ms=-10.0, token_ms=10.0, tokens_left=100)
    assert chosen(a, b, cost=cost, room=6) == [6, 0]
    assert chosen(b, a, cost=cost, room=6) == [0, 6]
    assert chosen(b, a, cost=cost, room=8)[1] == 6, "three tokens are what it needs"


def test_where_all_are_behind_nodes_that_do_not_pay_help_nobody() -> None:
    cost = CostModel({8: 10.0, 16: 20.0})
    late = Offer(chain(0.9, 0.8, 0.7), slack_ms=2.0, token_ms=9.0, tokens_left=100)
    assert chosen(late, *[Offer()] * 7, cost=cost)[0] > 0, "who is behind alone may take the time of others"
    assert chosen(*[late] * 8, cost=cost) == [0] * 8, "7.2 tokens more than eight, for twice the time"


def test_what_is_lost_takes_nothing_from_others() -> None:
    cost = CostModel({8: 10.0, 16: 14.0})
    crowd = [Offer() for _ in range(7)]
    late = Offer(chain(0.6, 0.5, 0.4), slack_ms=-200.0, token_ms=9.0, tokens_left=100)
    assert chosen(late, *crowd, cost=cost)[0] == 3, "in a hundred tokens it can be in time again"
    assert chosen(late._replace(tokens_left=30), *crowd, cost=cost)[0] == 0, "in thirty it cannot"


def test_a_sequence_in_time_bounds_the_step() -> None:
    cost = CostModel({8: 10.0, 16: 14.0})
    late = Offer(chain(0.6, 0.5, 0.4), slack_ms=2.0, token_ms=9.0, tokens_left=100)
    crowd = [Offer() for _ in range(6)]
    tight = Offer(slack_ms=12.0, token_ms=20.0, tokens_left=100)
    assert chosen(late, tight, *crowd, cost=cost)[0] == 0
    assert chosen(late, tight._replace(slack_ms=14.0), *crowd, cost=cost)[0] == 3
    assert chosen(Offer(chain(*[0.9] * 6)), tight._replace(slack_ms=12.0), *crowd, cost=cost)[0] == 0


def test_drawn_nodes_are_counted_and_stay() -> None:
    drawn = Offer(taken=3, gained=2.0, slack_ms=-10.0, token_ms=10.0, tokens_left=50)
    selection = select([drawn, Offer(chain(0.9))], STEEP)
    assert selection.step_ms == STEEP.step_ms(5)
    selection.choose(10)
    assert selection.counts[0] == 0 and selection.expected[0] == 2.0


def test_an_empty_step_is_none() -> None:
    selection = Selection([], STEEP)
    selection.choose(10)
    assert selection.step_ms == 0.0
