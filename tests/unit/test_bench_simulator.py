"""simulate-check's real runs: which requests each round has, and what is kept of them."""

from __future__ import annotations

import random

import pytest

from benchmarks.peers.peer import PeerError
from benchmarks.peers.tasks import TASKS
from benchmarks.simulator.real import Plan, _lines, _requests
from benchmarks.slo.load import Record
from benchmarks.slo.trace import Arrival

PROMPTS = {kind: [(100 * k + i,) * (i + 1) for i in range(5)] for k, kind in enumerate(TASKS)}
PLAN = Plan(rounds=3, alone=5, together=4, rate=10.0, window_s=2.0)


def _all(plan: Plan) -> list[Arrival]:
    return [
        a for each in _requests(plan, PROMPTS, random.Random(0)) for a in (*each.alone, *each.together, *each.loaded)
    ]


def test_rounds_are_alike_and_nobody_asks_twice() -> None:
    warm_up, *rounds = _requests(PLAN, PROMPTS, random.Random(0))
    assert not warm_up.loaded and {arrival.tenant for arrival in warm_up.alone} == {""}
    assert [(len(each.alone), len(each.together)) for each in rounds] == [(5, 4)] * 3
    assert all(len(each.loaded) > 0 and each.loaded[-1].at_s < 2.0 for each in rounds)
    asked = [(a.tenant, a.token_ids) for each in rounds for a in (*each.alone, *each.together, *each.loaded)]
    assert len(asked) == len(set(asked)), "whatever a drafter or a cache keeps of a tenant, it has seen no answer"


def test_lines_are_in_the_order_in_which_requests_were_sent_and_rounds_lie_apart() -> None:
    late, soon = sorted(_all(PLAN), key=lambda arrival: -arrival.at_s)[:2]
    lines = _lines([Record(late, "finished"), Record(soon, "shed")], 300.0)
    assert [line["at_s"] for line in lines] == pytest.approx([soon.at_s + 300.0, late.at_s + 300.0], abs=1e-6)
    with pytest.raises(PeerError, match="1 of 2 requests failed: no"):
        _lines([Record(late, "finished"), Record(soon, "failed", error="no")], 0.0)
