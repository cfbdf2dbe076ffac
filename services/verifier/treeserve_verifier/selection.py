"""Which draft nodes are verified: first those that sequences need to be in time, then those that pay most.

These are the two phases of AdaServe (Li et al., 2025), on a measured cost of rows in place of a fixed budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from treeserve_verifier.cost_model import CostModel

# -f, f the expected acceptance; depth; whose it is, as a place in the list of offers; and what tells it from others.
RatedNode = tuple[float, int, int, int, int]


class Offer(NamedTuple):
    """A decoding sequence: how it stands, and the draft nodes there are for it.

    Attributes:
        nodes: sorted; any beginning of them may be taken.
        slack_ms: until its next token is due; negative if that is late, infinite if it was promised no time.
        token_ms: time per output token that it was promised.
        tokens_left: tokens that it may still emit.
        taken, gained: nodes that are verified in any case, and the sum of their f.
        reserve_ms: by how much the last token may be late and the promise be kept.
    """

    nodes: Sequence[RatedNode] = ()
    slack_ms: float = math.inf
    token_ms: float = math.inf
    tokens_left: int = 1
    taken: int = 0
    gained: float = 0.0
    reserve_ms: float = 0.0


class Selection:
    """The rows with logits of a step: a root for each sequence, and the nodes chosen so far.

    With s the duration of the step, ell the decode time and o the tokens of sequence r so far, it needs
    (ell + s) / TPOT_r - o tokens of the step, root included, which is 1 + (s - slack_r) / TPOT_r.

    Attributes:
        counts: for each sequence, how many of its offered nodes are chosen.
        expected: for each, tokens that the step should emit beyond one.
    """

    def __init__(self, offers: Sequence[Offer], cost: CostModel) -> None:
        self._offers = offers
        self._cost = cost
        self._rows = len(offers) + sum(offer.taken for offer in offers)
        self.counts = [0] * len(offers)
        self.expected = [offer.gained for offer in offers]

    @property
    def rows(self) -> int:
        """Roots and chosen nodes."""
        return self._rows

    @property
    def step_ms(self) -> float:
        """Expected duration of the step."""
        return self._cost.step_ms(self._rows) if self._rows else 0.0

    def choose(self, room: int) -> None:
        """Choose nodes, `room` at most."""
        room -= self._meet_targets(room)
        self._fill(room)

    def latest_end(self, index: int, step_ms: float) -> float:
        """Duration of the step up to which this sequence is in time after it.

        Infinite if it was promised nothing or its promise is lost: if it would end late after steps of `step_ms`.
        """
        offer = self._offers[index]
        if offer.slack_ms == math.inf or self._is_lost(index, step_ms / (1.0 + self.expected[index])):
            return math.inf
        return offer.slack_ms + self.expected[index] * offer.token_ms

    def _meet_targets(self, room: int) -> int:
        """First phase: the most behind first, give each what it needs. Returns how many nodes were chosen.

        They may cost more than they pay, as long as those who are behind get more tokens per unit time together, and
        nobody who is in time comes too late by them. So the time is taken from those who have some.
        """
        step_ms = self.step_ms
        behind = [(self._need(i, step_ms), i) for i, offer in enumerate(self._offers) if offer.slack_ms < step_ms]
        all_behind = [i for _, i in behind]
        chosen = 0
        for need, i in sorted(behind, reverse=True):
            if need > 1.0 + self.expected[i]:
                count = self._count_for(i, room - chosen, all_behind)
                self._take(i, count)
                chosen += count
        return chosen

    def _need(self, index: int, step_ms: float) -> float:
        """Tokens of the step that bring this sequence in time, no more than its deepest node could."""
        offer = self._offers[index]
        deepest = max((depth for _, depth, *_ in offer.nodes), default=0)
        return min(1.0 + (step_ms - offer.slack_ms) / offer.token_ms, deepest + 1.0)

    def _count_for(self, index: int, room: int, behind: Sequence[int]) -> int:
        """The fewest nodes that bring this sequence in time; if none do, those that make it fastest.

        None if even so its promise is lost: what it cannot use would be taken from others.

        Args:
            behind: all who are.
        """
        before = together = sum(1.0 + self.expected[i] for i in behind)
        before_ms = self.step_ms
        offer, emitted, limit_ms = self._offers[index], 1.0 + self.expected[index], self._limit_ms(index)
        best, best_token_ms = 0, self.step_ms / emitted
        for count, node in enumerate(offer.nodes[:room], start=1):
            step_ms = self._cost.step_ms(self._rows + count)
            if step_ms > limit_ms:
                break
            emitted, together = emitted - node[0], together - node[0]
            if together * before_ms < before * step_ms:
                continue
            if emitted >= self._need(index, step_ms):
                return count
            if step_ms / emitted < best_token_ms:
                best, best_token_ms = count, step_ms / emitted
        return 0 if self._is_lost(index, best_token_ms) else best

    def _is_lost(self, index: int, token_ms: float) -> bool:
        """Whether the sequence would end late if from now on a token took so long."""
        offer = self._offers[index]
        return is_lost(offer.slack_ms + offer.reserve_ms, offer.token_ms, offer.tokens_left, token_ms)

    def _limit_ms(self, without: int | None = None) -> float:
        """Duration that makes nobody late who is in time at present."""
        step_ms = self.step_ms
        ends = (
            offer.slack_ms + self.expected[i] * offer.token_ms
            for i, offer in enumerate(self._offers)
            if i != without and offer.slack_ms < math.inf
        )
        return min((end for end in ends if end >= step_ms), default=math.inf)

    def _fill(self, room: int) -> None:
        """Second phase: of all nodes that are left, best first, the number that emits most tokens per unit time."""
        rest = sorted(chain(*(offer.nodes[count:] for offer, count in zip(self._offers, self.counts, strict=True))))[
            :room
        ]
        if not rest:
            return
        limit_ms, emitted = self._limit_ms(), len(self._offers) + sum(self.expected)
        best, best_rate = 0, emitted / self.step_ms
        for count, node in enumerate(rest, start=1):
            emitted -= node[0]
            step_ms = self._cost.step_ms(self._rows + count)
            if step_ms > limit_ms:
                break
            if emitted / step_ms > best_rate:
                best, best_rate = count, emitted / step_ms
        for node in rest[:best]:
            self._take(node[2], 1)

    def _take(self, index: int, count: int) -> None:
        start = self.counts[index]
        self.expected[index] -= sum(node[0] for node in self._offers[index].nodes[start : start + count])
        self.counts[index] += count
        self._rows += count


def is_lost(slack_ms: float, promised_ms: float, tokens_left: int, token_ms: float) -> bool:
    """Whether a sequence that was promised a token every `promised_ms` ends late if each takes `token_ms` from now."""
    return slack_ms - promised_ms + tokens_left * (promised_ms - token_ms) < 0.0
