"""The router's books of one verifier."""

from __future__ import annotations

import pytest
from support.clock import Clock
from support.dispatching import BookedVerifier
from support.tickets import ticket

from treeserve_core.sampling import ServiceClass
from treeserve_router.placement import Backlog


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(clock: Clock) -> BookedVerifier:
    return BookedVerifier("a", clock, lambda: None)


def test_what_was_sent_counts_before_it_is_reported(verifier: BookedVerifier) -> None:
    verifier.report(sequences=1)
    mine = [ticket(prompt_tokens=20) for _ in range(2)]
    for each in mine:
        verifier.submit(each)
    assert (verifier.state.sequences, verifier.state.unreported, verifier.state.pending_blocks) == (3, 2, 6)
    verifier.report(sequences=3)
    assert (verifier.state.sequences, verifier.state.unreported) == (3, 0)
    verifier.report(sequences=1)  # older than the submissions
    assert verifier.state.sequences == 2
    verifier.start(*mine)
    assert verifier.state.pending_blocks == 0
    verifier.end(*mine)
    assert verifier.state.sequences == 1


def test_what_starts_is_told_by_urgency(verifier: BookedVerifier) -> None:
    urgent, long = ticket(ServiceClass.REALTIME, 10), ticket(ServiceClass.BATCH, 500, prefix_tokens={"a": 400})
    verifier.submit(urgent)
    verifier.submit(long)
    assert verifier.state.ahead_of(ServiceClass.REALTIME) == Backlog(1, 10)
    assert verifier.state.ahead_of(ServiceClass.STANDARD) == Backlog(1, 10)
    assert verifier.state.ahead_of(ServiceClass.BATCH) == Backlog(2, 110)
    verifier.start(urgent)
    verifier.end(long)
    assert verifier.state.ahead_of(ServiceClass.BATCH) == Backlog()


def test_what_is_late_already_is_started_last_and_does_not_count(verifier: BookedVerifier, clock: Clock) -> None:
    mine, patient = ticket(prompt_tokens=100, ttft_ms=2000), ticket(prompt_tokens=30)
    verifier.submit(mine, waited_s=1.5)
    verifier.submit(patient)
    assert verifier.state.ahead_of(ServiceClass.STANDARD) == Backlog(2, 130)
    clock.now += 0.4
    assert verifier.state.ahead_of(ServiceClass.STANDARD) == Backlog(2, 130)
    clock.now += 0.2
    assert verifier.state.ahead_of(ServiceClass.STANDARD) == Backlog(1, 30)
    assert verifier.state.pending_blocks == 8 + 3  # it will take its blocks even so
    verifier.start(mine)
    assert (verifier.state.ahead_of(ServiceClass.STANDARD), verifier.state.pending_blocks) == (Backlog(1, 30), 3)


def test_what_is_late_for_its_first_token_holds_no_place(verifier: BookedVerifier, clock: Clock) -> None:
    """As many as half the verifier's places."""
    mine = [ticket(prompt_tokens=10, ttft_ms=2000) for _ in range(5)]
    for each in mine:
        verifier.submit(each)
    assert (verifier.state.sequences, verifier.state.max_sequences) == (5, 4)
    clock.now += 2.1
    assert verifier.state.sequences == 3
    verifier.start(*mine[:4])
    assert verifier.state.sequences == 4, "who has a token holds its place"


def test_times_are_learned_from_what_was_sent(verifier: BookedVerifier, clock: Clock) -> None:
    verifier.report(step_s=0.01, prefill_tokens_per_s=1000)
    for _ in range(50):
        mine, behind = ticket(prompt_tokens=500), ticket(prompt_tokens=500)
        verifier.submit(mine)
        verifier.submit(behind)
        clock.now += 1.01  # twice as slow as it says
        verifier.start(mine)
        clock.now += 1.0
        verifier.start(behind)
        for _ in range(10):
            clock.now += 0.03
            verifier.ledger.tokens(mine, 2)
        clock.now += 5  # the end brings no tokens, and does not count
        verifier.end(mine, behind)
    assert verifier.state.ttft_s(ticket(prompt_tokens=500)) == pytest.approx(1.01, rel=0.05)
    assert verifier.state.latency.tpot_s == pytest.approx(0.015 + 1.0 / 20, rel=0.01)


def test_sequences_of_other_routers_that_wait_are_guessed_to_have_prompts(verifier: BookedVerifier) -> None:
    mine = [ticket(prompt_tokens=256) for _ in range(3)]
    for each in mine:
        verifier.submit(each)
    verifier.report(sequences=3, waiting=2)
    assert verifier.state.others_tokens == 0  # all are ours, and counted
    verifier.report(sequences=5, waiting=4)
    assert verifier.state.others_tokens == 2 * 256


def test_a_state_is_made_once_until_something_changes(verifier: BookedVerifier) -> None:
    before = verifier.state
    assert verifier.state is before
    verifier.submit(ticket())
    assert verifier.state is not before
