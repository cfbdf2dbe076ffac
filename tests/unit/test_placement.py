"""Placement: who is filtered out, and who wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.tickets import ticket as any_ticket

from treeserve_core.sampling import StoppingCriteria
from treeserve_router import placement
from treeserve_router.batcher import Batcher
from treeserve_router.latency_model import Fit, Latency
from treeserve_router.mailbox import Mailbox
from treeserve_router.placement import Backlog, VerifierState, rank
from treeserve_router.queue import Ticket


def ticket(total_tokens: int = 10, preferred: str = "") -> Ticket:
    return any_ticket(prompt_tokens=1, max_tokens=total_tokens - 1, preferred_verifier=preferred)


def verifier(name: str = "a", **changes: Any) -> VerifierState:
    defaults: dict[str, Any] = {
        "max_context_tokens": 100,
        "max_sequences": 4,
        "sequences": 1,
        "free_blocks": 50,
        "total_blocks": 100,
    }
    return VerifierState(f"host:{name}", name, **{**defaults, **changes})


def place(mine: Ticket, verifiers: Iterable[VerifierState]) -> VerifierState | None:
    """Where no class reserves places."""
    return placement.place(mine, verifiers, partial(Batcher({}).has_room, mine))


@pytest.mark.parametrize(
    "unfit",
    [
        verifier(draining=True),
        verifier(max_context_tokens=9),
        verifier(sequences=4),
        verifier(free_blocks=0),
        verifier(holding_off=True),
    ],
)
def test_the_unfit_are_filtered_out(unfit: VerifierState) -> None:
    assert place(ticket(), [unfit]) is None
    fit = verifier("b", sequences=3, free_blocks=1)
    assert place(ticket(), [unfit, fit]) == fit


def test_a_full_verifier_can_serve_later_but_a_draining_or_small_one_never() -> None:
    assert verifier(sequences=4, free_blocks=0, holding_off=True).can_serve(ticket())
    assert not verifier(draining=True).can_serve(ticket())
    assert not verifier(max_context_tokens=9).can_serve(ticket())
    assert verifier(max_context_tokens=10).can_serve(ticket(10))


def test_before_its_first_report_a_verifier_has_room() -> None:
    assert place(ticket(), [verifier(sequences=0, free_blocks=0, total_blocks=0)]) is not None


def test_the_scarcer_resource_counts() -> None:
    crowded, full_of_kv = verifier("a", sequences=3, free_blocks=90), verifier("b", sequences=1, free_blocks=10)
    assert place(ticket(), [crowded, full_of_kv]) == crowded
    assert crowded.load == 0.75
    assert full_of_kv.load == 0.9


def test_ties_go_to_the_lowest_address() -> None:
    assert place(ticket(), [verifier("b"), verifier("a")]) == verifier("a")


def test_a_session_stays_unless_its_verifier_is_much_busier() -> None:
    idle, home = verifier("a", sequences=0, free_blocks=100), verifier("b", sequences=0, free_blocks=80)
    assert place(ticket(), [idle, home]) == idle
    assert place(ticket(preferred="b"), [idle, home]) == home
    busy_home = verifier("b", sequences=3)
    assert place(ticket(preferred="b"), [idle, busy_home]) == idle


def rated(name: str, prefill_tokens_per_s: float, **changes: Any) -> VerifierState:
    return verifier(name, latency=Latency(prefill_tokens_per_s=prefill_tokens_per_s, **changes))


def long_ticket(prompt_tokens: int, **fields: Any) -> Ticket:
    request = replace(ticket().request, prompt_token_ids=(1,) * prompt_tokens, stopping=StoppingCriteria(max_tokens=8))
    return Ticket(request, (), Mailbox(), **fields)


def big(state: VerifierState, **changes: Any) -> VerifierState:
    return replace(state, max_context_tokens=100_000, **changes)


class TestScore:
    def test_a_prefix_is_worth_the_time_of_its_prefill(self) -> None:
        mine = long_ticket(1500, prefix_tokens={"b": 1200})
        slow_a, slow_b = big(rated("a", 1000)), big(rated("b", 1000))
        assert place(mine, [slow_a, slow_b]) == slow_b
        (best, cost), (other, other_cost) = rank(mine, [slow_a, slow_b])
        assert (best, other) == (slow_b, slow_a)
        assert (cost.prefill_s, other_cost.prefill_s) == (pytest.approx(0.3), pytest.approx(1.5))

    def test_the_same_prefix_counts_less_where_prefill_is_fast(self) -> None:
        mine = long_ticket(1500, prefix_tokens={"b": 1200})
        for rate, chosen in ((1000, "b"), (100_000, "a")):
            idle, home = big(rated("a", rate), sequences=0), big(rated("b", rate), sequences=3)
            assert place(mine, [idle, home]).verifier_id == chosen  # type: ignore[union-attr]

    def test_prompts_in_front_count_against_a_prefix(self) -> None:
        mine = long_ticket(1500, prefix_tokens={"b": 1200})
        idle, busy = big(rated("a", 1000)), big(rated("b", 1000))
        for tokens, chosen in ((1100, "b"), (1300, "a")):
            starting = (Backlog(), *(Backlog(2, tokens),) * 3)
            assert place(mine, [idle, replace(busy, starting=starting)]).verifier_id == chosen  # type: ignore[union-attr]

    def test_a_verifier_whose_tokens_take_longer_is_avoided(self) -> None:
        fast, alike = rated("b", 1000, tpot_s=0.010), rated("c", 1000, tpot_s=0.012)
        slow = rated("a", 1000, tpot_s=0.020)
        assert place(ticket(), [slow, fast, alike]) == fast
        costs = {v.verifier_id: cost for v, cost in rank(ticket(), [slow, fast, alike])}
        assert (costs["b"].slow_s, costs["c"].slow_s) == (0, 0)
        assert costs["a"].slow_s == pytest.approx(0.75)

    def test_one_that_takes_longer_than_it_says_is_avoided(self) -> None:
        honest, late = rated("b", 1000), rated("a", 1000, fits=(Fit(overhead_s=0.1),) * 4)
        assert place(ticket(), [late, honest]) == honest

    def test_the_parts_add_up_and_the_order_is_that_of_place(self) -> None:
        states = [big(rated(name, rate), sequences=n) for name, rate, n in (("a", 500, 2), ("b", 900, 0), ("c", 10, 1))]
        mine = long_ticket(300, preferred_verifier="c")
        ranked = rank(mine, states)
        assert ranked[0][0] == place(mine, states)
        assert [cost.total_s for _, cost in ranked] == sorted(cost.total_s for _, cost in ranked)
        cost = {v.verifier_id: c for v, c in ranked}["c"]
        assert cost.affinity_s < 0
        assert cost.total_s == cost.wait_s + cost.prefill_s + cost.load_s + cost.slow_s + cost.affinity_s
