"""Echo: a sequence that repeats an earlier passage of its own is noticed. What follows from it: test_asking."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from treeserve_verifier.echo import Echo

PASSAGE = tuple(range(10, 60))
PLACE, LEAST = 3, 4  # tokens to find the place, and to expect more


def _heard(*tokens: int, after: tuple[int, ...] = PASSAGE) -> Echo:
    """An echo that read a passage and followed what came then."""
    echo = Echo()
    echo.follow((*after, *tokens), len(after))
    return echo


def _state(echo: Echo) -> tuple[int, int]:
    return echo.length, echo.expected


def test_as_many_tokens_are_expected_as_came_again() -> None:
    repeated = [_state(_heard(*PASSAGE[20 : 20 + count])) for count in range(16)]
    lengths = [max(0, count - PLACE) for count in range(16)]
    assert repeated == [(length, length if length >= LEAST else 0) for length in lengths]


def test_new_text_and_single_tokens_that_come_again_are_no_echo() -> None:
    assert _state(_heard(*range(100, 200))) == (0, 0)
    shuffled = [token for pair in zip(PASSAGE, range(100, 150), strict=True) for token in pair]
    assert _state(_heard(*shuffled)) == (0, 0)
    assert _state(_heard(7, 7, after=())) == _state(_heard(after=())) == (0, 0), "shorter than a place"


def test_another_token_ends_it_and_the_place_must_be_found_anew() -> None:
    assert _state(_heard(*PASSAGE[:12], 99)) == (0, 0)
    assert _state(_heard(*PASSAGE[:12], 99, *PASSAGE[13 : 13 + PLACE])) == (0, 0)
    assert _state(_heard(*PASSAGE[:12], 99, *PASSAGE[13 : 13 + PLACE + 5])) == (5, 5)


def test_the_latest_place_counts() -> None:
    twice = (1, 2, 3, *range(20, 30), 1, 2, 3, *range(40, 50))
    assert _heard(1, 2, 3, *range(40, 46), after=twice).length == 6
    assert _heard(1, 2, 3, *range(20, 26), after=twice).length == 5, "their first tells which place it is"


def test_a_passage_may_repeat_itself_without_end() -> None:
    assert _heard(*(1, 2, 3, 4, 5) * 20, after=()).length == 100 - 5 - PLACE
    assert _heard(*(7,) * 20, after=()).length == 20 - 1 - PLACE


def test_after_use_the_next_must_be_twice_as_long_until_a_tree_comes_true() -> None:
    def least(*history: Callable[[Echo], None]) -> int:
        for length in range(1, len(PASSAGE) - PLACE):
            echo = _heard(*PASSAGE[: PLACE + length])
            for event in history:
                event(echo)
            if echo.expected:
                return length
        return -1

    assert least() == LEAST
    assert least(Echo.used) == 2 * LEAST
    assert least(Echo.used, Echo.used, Echo.used) == 8 * LEAST
    assert least(Echo.used, Echo.used, Echo.proved) == LEAST
    assert least(Echo.used, Echo.proved, Echo.used) == 2 * LEAST


def test_after_a_restart_tokens_are_counted_from_nothing() -> None:
    tokens = (*PASSAGE, *PASSAGE)
    echo = _heard(*PASSAGE[:20])
    assert echo.expected > 0
    echo.restart()
    assert _state(echo) == (0, 0)
    echo.follow(tokens[: len(PASSAGE) + 21], len(PASSAGE) + 20)
    assert _state(echo) == (0, 0), "the tokens before are known: one more finds the place"
    echo.follow(tokens[: len(PASSAGE) + 25], len(PASSAGE) + 21)
    assert _state(echo) == (4, 4)
    echo.used()
    echo.restart()
    echo.follow(tokens[: len(PASSAGE) + 33], len(PASSAGE) + 25)
    assert _state(echo) == (7, 0), "what was used in vain is not forgotten"


few_tokens = st.lists(st.integers(0, 3), max_size=60)


@given(prompt=few_tokens, output=few_tokens, sizes=st.lists(st.integers(1, 7), min_size=60, max_size=60))
def test_tokens_that_come_in_pieces_count_as_in_one(prompt: list[int], output: list[int], sizes: list[int]) -> None:
    whole, pieces, single = Echo(), Echo(), Echo()
    tokens = [*prompt, *output]
    whole.follow(tokens, len(prompt))
    for base_len in range(len(prompt), len(tokens)):
        single.follow(tokens[: base_len + 1], base_len)
    base_len = len(prompt)
    for size in sizes:
        if base_len < len(tokens):
            pieces.follow(tokens[: base_len + size], base_len)
            base_len += size
    assert _state(whole) == _state(pieces) == _state(single)


@given(prompt=few_tokens, unheard=few_tokens, output=few_tokens)
def test_what_nobody_listened_to_is_read_afterwards(prompt: list[int], unheard: list[int], output: list[int]) -> None:
    listened, rejoined = Echo(), Echo()
    before = [*prompt, *unheard]
    listened.follow(before, len(prompt))
    rejoined.follow(prompt, len(prompt))
    listened.restart()
    rejoined.restart()
    for echo in (listened, rejoined):
        echo.follow([*before, *output], len(before))
    assert _state(listened) == _state(rejoined)
