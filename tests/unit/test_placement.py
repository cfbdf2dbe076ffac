"""Placement: who is filtered out, and who wins."""

from __future__ import annotations

from typing import Any

import pytest

from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.mailbox import Mailbox
from treeserve_router.placement import VerifierState, place
from treeserve_router.queue import Ticket


def ticket(total_tokens: int = 10, preferred: str = "") -> Ticket:
    request = RouterRequest(
        request_id="r",
        prompt_token_ids=(1,),
        generated_token_ids=(),
        sampling=SamplingParams(),
        stopping=StoppingCriteria(max_tokens=total_tokens - 1),
        limits=SequenceLimits(),
    )
    return Ticket(request, (), Mailbox(), preferred_verifier=preferred)


def verifier(name: str = "a", **changes: Any) -> VerifierState:
    defaults: dict[str, Any] = {
        "max_context_tokens": 100,
        "max_sequences": 4,
        "sequences": 1,
        "free_blocks": 50,
        "total_blocks": 100,
    }
    return VerifierState(f"host:{name}", name, **{**defaults, **changes})


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
