"""The verifier's fence against turns of a session that come too late."""

from __future__ import annotations

import pytest
from support.clock import Clock

from treeserve_core.errors import StaleEpochError
from treeserve_verifier.session_fence import SessionFence


def test_an_older_turn_is_refused_and_the_newest_may_come_again() -> None:
    fence = SessionFence(Clock(0.0))
    fence.check("t", "s", 5)
    fence.check("t", "s", 5)
    fence.check("t", "s", 7)
    for late in (5, 6):
        with pytest.raises(StaleEpochError):
            fence.check("t", "s", late)
    fence.check("t", "s", 7)


def test_a_refused_turn_moves_nothing() -> None:
    clock = Clock(0.0)
    fence = SessionFence(clock, ttl_s=10)
    fence.check("t", "s", 7)
    clock.now = 9
    with pytest.raises(StaleEpochError):
        fence.check("t", "s", 6)
    clock.now = 11
    fence.check("t", "s", 6)


def test_sessions_and_tenants_are_fenced_by_themselves() -> None:
    fence = SessionFence(Clock(0.0))
    fence.check("t", "s", 7)
    fence.check("t", "another", 1)
    fence.check("another", "s", 1)


@pytest.mark.parametrize(("session_id", "epoch"), [("s", 0), ("", 3)])
def test_what_nobody_counts_passes_and_fences_nothing(session_id: str, epoch: int) -> None:
    fence = SessionFence(Clock(0.0))
    fence.check("t", "s", 7)
    fence.check("t", session_id, epoch)
    fence.check("t", "s", 7)
    assert len(fence) == 1


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    fence = SessionFence(Clock(0.0), max_sessions=3)
    for n in range(10):
        fence.check("t", f"s{n}", 10)
    assert len(fence) == 3
    fence.check("t", "s0", 1)
    with pytest.raises(StaleEpochError):
        fence.check("t", "s9", 1)


def test_a_session_in_use_outlives_idle_ones() -> None:
    fence = SessionFence(Clock(0.0), max_sessions=2)
    fence.check("t", "used", 1)
    fence.check("t", "idle", 1)
    fence.check("t", "used", 2)
    fence.check("t", "new", 1)
    with pytest.raises(StaleEpochError):
        fence.check("t", "used", 1)


def test_expired_sessions_are_forgotten() -> None:
    clock = Clock(0.0)
    fence = SessionFence(clock, ttl_s=10)
    for n in range(5):
        fence.check("t", f"s{n}", 1)
    clock.now = 11
    fence.check("t", "new", 1)
    assert len(fence) == 1
