"""The drafter asks costly sources where its chooser says so, as far as it says, and counts what each source does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry
from support.clock import Clock

from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import UNPRICED, CommittedTokens, DraftPrices, DraftSequence, TreeShape
from treeserve_speculator.sources.growth import GrowthLimits, TreeGrowth

LIMITS = TreeLimits(8, 8)
PRICES = DraftPrices(token_us=3400.0, node=0.04)


class Teller:
    """Proposes a chain, and takes its time."""

    wants_top_tokens = False

    def __init__(self, name: str, clock: Clock, seconds: float, *tokens: int) -> None:
        self.name = name
        self.shapes: list[TreeShape | None] = []
        self._clock, self._seconds, self._tokens = clock, seconds, tokens

    def open(self, state: DraftSequence) -> None:
        pass

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        self._clock.now += self._seconds

    def close(self, state: DraftSequence) -> None:
        pass

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        self._clock.now += self._seconds
        self.shapes.append(state.shapes.get(self.name))
        return TokenTree.chain([state.tokens[-1], *self._tokens], [0.0] + [math.log(0.5)] * len(self._tokens))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def drafter_of(registry: CollectorRegistry, clock: Clock, *sources: Teller) -> Drafter:
    return Drafter(
        sources,
        vocab_size=100,
        eos_token_ids=frozenset(),
        limits=LIMITS,
        metrics=SpeculatorMetrics(registry),
        clock_s=clock,
    )


def opened(drafter: Drafter) -> DraftSequence:
    sequence = DraftSequence(1, [5, 6], 2, SamplingParams(), 8)
    drafter.open(sequence)
    return sequence


def step(drafter: Drafter, sequence: DraftSequence, prices: DraftPrices, *tokens: int) -> TokenTree:
    (proposal,) = drafter.draft([sequence], LIMITS, prices)
    drafter.commit(sequence, CommittedTokens(1, len(sequence.tokens), tokens, 8))
    drafter.learn()
    return proposal.tree


def test_a_source_that_costs_more_than_it_brings_is_left_out_and_shapes_reach_it(registry: CollectorRegistry) -> None:
    clock = Clock()
    cheap, slow = Teller("cheap", clock, 1e-5, 20), Teller("slow", clock, 0.02, 30, 31)
    drafter = drafter_of(registry, clock, cheap, slow)
    sequence = opened(drafter)
    for _ in range(60):
        step(drafter, sequence, PRICES, 10)
    assert len(cheap.shapes) == 60 and len(slow.shapes) < 15
    assert slow.shapes[:3] == [None] * 3  # while it is timed
    assert all(shape is not None for shape in slow.shapes[3:])
    assert cheap.shapes == [None] * 60


def test_without_prices_every_source_is_asked(registry: CollectorRegistry) -> None:
    clock = Clock()
    slow = Teller("slow", clock, 0.02, 30)
    drafter = drafter_of(registry, clock, Teller("cheap", clock, 1e-5, 20), slow)
    sequence = opened(drafter)
    for _ in range(10):
        step(drafter, sequence, UNPRICED, 10)
    assert slow.shapes == [None] * 10


def test_time_visits_and_right_guesses_are_counted_by_source(registry: CollectorRegistry) -> None:
    clock = Clock()
    drafter = drafter_of(registry, clock, Teller("a", clock, 0.001, 10, 11), Teller("b", clock, 0.002, 10, 12))
    sequence = opened(drafter)
    step(drafter, sequence, UNPRICED, 10, 11, 13)
    step(drafter, sequence, UNPRICED, 14)

    def counted(name: str, source: str) -> float | None:
        return registry.get_sample_value(f"treeserve_speculator_{name}_total", {"source": source})

    # Each visits the root and the node of 10, then the second root.
    assert (counted("visits", "a"), counted("right", "a")) == (3, 2)
    assert (counted("visits", "b"), counted("right", "b")) == (3, 1)
    assert counted("source_seconds", "a") == pytest.approx(0.004)  # two trees, two commits
    assert counted("source_seconds", "b") == pytest.approx(0.008)


@pytest.mark.parametrize(("least_mass", "levels"), [(0.0, 4), (0.3, 2), (0.6, 1)])
def test_growth_stops_where_a_level_is_not_followed_often_enough(least_mass: float, levels: int) -> None:
    growth = TreeGrowth(5, GrowthLimits(16, 4, 1, 0.01, least_mass), frozenset())
    while level := growth.next_level():
        for node in level:
            growth.expand(node, [10], [math.log(0.5)])
    assert max(growth.depths) == levels
