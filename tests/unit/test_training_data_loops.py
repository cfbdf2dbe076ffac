"""Outputs that fall into repetition are found, whole texts that repeat a little are not."""

from __future__ import annotations

import random

from treeserve_training.loops import loop_start

FRESH = random.Random(0).sample(range(5000), 256)


def test_text_without_repetition_does_not_loop() -> None:
    assert loop_start(FRESH) is None
    assert loop_start([]) is None
    assert loop_start(FRESH[:5]) is None


def test_a_phrase_said_again_is_no_loop() -> None:
    assert loop_start(FRESH[:100] + FRESH[20:60] + FRESH[100:200]) is None


def test_a_loop_begins_with_the_second_copy() -> None:
    phrase = FRESH[100:112]
    assert loop_start(FRESH[:50] + phrase * 12) == 50 + len(phrase)


def test_one_token_over_and_over_is_a_loop() -> None:
    assert loop_start(FRESH[:30] + [7] * 80) == 31


def test_a_loop_that_counts_is_found() -> None:
    phrase = FRESH[100:115]
    start = loop_start(FRESH[:40] + [token for number in range(10) for token in [9000 + number, *phrase]])
    assert start == 40 + 1 + len(phrase) + 1, "the second copy without its number"


def test_a_loop_shorter_than_a_window_is_let_pass() -> None:
    assert loop_start(FRESH[:50] + FRESH[100:110] * 4) is None


def test_text_after_the_loop_does_not_hide_it() -> None:
    assert loop_start([7] * 100 + FRESH) == 1
