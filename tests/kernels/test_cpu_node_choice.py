"""The draft nodes that runs of decode steps choose are those that the verifier's selection chooses."""

from __future__ import annotations

import ctypes
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from support.run_bench import TABLES

from treeserve_kernels.cpu import library
from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.decode_run import costs_of
from treeserve_kernels.cpu.library import is_built
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.selection import Offer, Selection

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


def random_offer(rng: random.Random, index: int, step_ms: float) -> Offer:
    some = rng.choice([(0.25, 0.5, 0.9, 1.0), (0.6,), (0.0,), [rng.random() for _ in range(24)]])
    rated = sorted((-rng.choice(some), rng.randint(1, 9)) for _ in range(rng.choice([0, 1, 3, 8, 24])))
    nodes = [(value, depth, index, order, order) for order, (value, depth) in enumerate(rated)]
    if rng.random() < 0.3:
        return Offer(nodes, tokens_left=rng.randint(1, 300))
    token_ms = step_ms * rng.choice([0.3, 0.7, 0.95, 1.5, 4.0, math.inf])
    slack_ms = rng.choice([step_ms, rng.uniform(-4.0, 4.0) * step_ms, rng.uniform(-60.0, 1.0) * step_ms])
    reserve_ms = rng.choice([0.0, rng.uniform(0.0, 40.0) * min(token_ms, step_ms)])
    return Offer(nodes, slack_ms, token_ms, rng.choice([1, 2, 20, 300]), reserve_ms=reserve_ms)


def choose(offers: Sequence[Offer], table: dict[int, float], room: int) -> tuple[list[int], list[float]]:
    of_each, kept = (c.Offer * len(offers))(), []
    for each, offer in zip(of_each, offers, strict=True):
        n = len(offer.nodes)
        accepted = (ctypes.c_double * n)(*[-node[0] for node in offer.nodes])
        depths = (ctypes.c_int32 * n)(*[node[1] for node in offer.nodes])
        kept += [accepted, depths]
        each.num_nodes, each.accepted, each.depths = n, accepted, depths
        each.slack_ms, each.token_ms, each.reserve_ms = offer.slack_ms, offer.token_ms, offer.reserve_ms
        each.tokens_left = offer.tokens_left
    counts, expected = (ctypes.c_int32 * len(offers))(*[-1] * len(offers)), (ctypes.c_double * len(offers))()
    library.check(library.load().ts_choose_nodes(costs_of(table), len(offers), of_each, room, counts, expected))
    return list(counts), list(expected)


def selected(offers: Sequence[Offer], cost: CostModel, room: int) -> Selection:
    selection = Selection(offers, cost)
    selection.choose(room)
    return selection


def test_the_nodes_chosen_are_those_of_the_verifier() -> None:
    rng, seen = random.Random(1), Counter[str]()
    for _ in range(3000):
        table = rng.choice(TABLES)
        cost, count, room = CostModel(table), rng.choice([0, 1, 2, 3, 5, 8]), rng.choice([0, 1, 4, 12, 30, 64])
        offers = [random_offer(rng, i, cost.step_ms(count)) for i in range(count)]
        expected = selected(offers, cost, room)
        counts, emitted = choose(offers, table, room)
        assert counts == expected.counts, (offers, table, room)
        assert emitted == pytest.approx(expected.expected, rel=1e-12, abs=1e-12)
        seen["some"] += any(counts)
        seen["targets"] += Selection(offers, cost)._meet_targets(room) > 0
        without = [offer._replace(slack_ms=math.inf, token_ms=math.inf) for offer in offers]
        seen["targets matter"] += selected(without, cost, room).counts != counts
        forgiven = [offer._replace(reserve_ms=1e15) for offer in offers]
        seen["lost"] += selected(forgiven, cost, room).counts != counts
    assert min(seen[name] for name in ("some", "targets", "targets matter")) > 300 and seen["lost"] > 60, seen


def test_rounding_is_that_of_the_verifier() -> None:
    """Whether a node pays for those who are behind is a matter of the last bit here."""
    chains = ((0.7,), (0.8,), (0.3, 0.1))
    nodes = [[(-f, depth, i, depth, depth) for depth, f in enumerate(each, start=1)] for i, each in enumerate(chains)]
    terms = ((-10.0, 10.0), (0.0, 5.0), (-20.0, 5.0))
    offers = [Offer(each, *of_each, 1000, reserve_ms=1e9) for each, of_each in zip(nodes, terms, strict=True)]
    table = {1: 10.0, 4: 11.0, 5: 11.55, 6: 12.13}
    assert choose(offers, table, 6)[0] == selected(offers, CostModel(table), 6).counts == [1, 1, 2]
