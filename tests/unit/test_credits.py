"""Credit flow control: nothing is sent without credit, and a steady reader never starves the sender."""

from __future__ import annotations

import pytest

from treeserve_wire.credits import Credits, CreditWindow


def test_nothing_without_credit() -> None:
    credits = Credits()
    assert not credits.try_take()
    credits.grant(2)
    assert [credits.try_take() for _ in range(3)] == [True, True, False]
    assert credits.available == 0


def test_negative_credit_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Credits().grant(-1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_steady_reader_keeps_the_sender_going_within_the_window(size: int) -> None:
    sender, window, grants = Credits(size), CreditWindow(size), 0
    for _ in range(10 * size):
        assert sender.try_take()
        if granted := window.consume():
            grants += 1
            sender.grant(granted)
        assert sender.available <= size
    assert grants <= 10 * size / max(1, size // 2)


def test_a_reader_that_stops_leaves_at_most_a_window_in_flight() -> None:
    sender = Credits(8)
    assert sum(sender.try_take() for _ in range(100)) == 8


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="0 frames"):
        CreditWindow(0)
