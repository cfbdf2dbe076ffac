"""User functions that do all a draft source must not do; some as draft sources with a life of their own.

Configured by their dotted names, as any user's are.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings

HANG_S = 3600.0


def raises(token_ids: list[int], budget: int) -> list[list[int]]:
    raise RuntimeError("no")


def exits(token_ids: list[int], budget: int) -> list[list[int]]:
    sys.exit("the process is to end")


def hangs(token_ids: list[int], budget: int) -> list[list[int]]:
    time.sleep(HANG_S)
    return []


def spins(token_ids: list[int], budget: int) -> list[list[int]]:
    while True:
        pass


def recurses(token_ids: list[int], budget: int) -> list[list[int]]:
    return recurses(token_ids, budget + 1)


def enormous(token_ids: list[int], budget: int) -> TokenTree:
    return TokenTree.chain([token_ids[-1]] * 20_000, [0.0] + [-0.1] * 19_999)


def endless(token_ids: list[int], budget: int) -> Iterator[Iterator[int]]:
    def ones() -> Iterator[int]:
        while True:
            yield 1

    while True:
        yield ones()


def beyond_the_vocabulary(token_ids: list[int], budget: int) -> list[list[int]]:
    return [[1, 2**40]]


def no_numbers(token_ids: list[int], budget: int) -> Any:
    return [[None, "a", 1.5]]


def no_lists(token_ids: list[int], budget: int) -> Any:
    return "candidates"


def another_root(token_ids: list[int], budget: int) -> TokenTree:
    return TokenTree.chain([token_ids[-1] ^ 1, 1, 2], [0.0, -0.1, -0.1])


def minus_infinity(token_ids: list[int], budget: int) -> TokenTree:
    return TokenTree.chain([token_ids[-1], 1, 2], [0.0, -0.1, -math.inf])


def twins(token_ids: list[int], budget: int) -> TokenTree:
    """Siblings with one token, in a tree that was never checked."""
    tree = TokenTree.chain([token_ids[-1], 1, 2], [0.0, -0.1, -0.1])
    object.__setattr__(tree, "parents", (-1, 0, 0))
    object.__setattr__(tree, "token_ids", (token_ids[-1], 1, 1))
    return tree


def not_a_number(token_ids: list[int], budget: int) -> TokenTree:
    tree = TokenTree.chain([token_ids[-1], 1, 2], [0.0, -0.1, -0.1])
    object.__setattr__(tree, "log_probs", (0.0, -0.1, math.nan))
    return tree


def harmless_nonsense(token_ids: list[int], budget: int) -> list[list[int]]:
    """Well-formed, and wrong nearly always."""
    return [[(token_ids[-1] * 7 + i + j) % 250 for j in range(4)] for i in range(5)]


# What each is counted as; hanging takes longer to show.
REASONS: dict[Callable[..., Any], str] = {
    raises: "raised",
    exits: "raised",
    recurses: "raised",
    enormous: "size",
    beyond_the_vocabulary: "token_ids",
    no_numbers: "token_ids",
    no_lists: "type",
    another_root: "root",
    minus_infinity: "log_probs",
    twins: "structure",
    not_a_number: "structure",
}


class Meddler:
    """A source that tampers with what it is shown, fails in every other call, and says it drew what it did not."""

    name = "meddler"
    wants_top_tokens = True

    def __init__(self, settings: SourceSettings) -> None:
        self._calls = 0

    def open(self, state: DraftSequence) -> None:
        state.disabled.add("ngram")
        self._fail_now_and_then()

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        state.prompt_len = -1
        self._fail_now_and_then()

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        self._fail_now_and_then()
        state.tokens.reverse()
        return TokenTree.chain([state.tokens[0], *state.tokens[:4]], [0.0] + [-0.1] * len(state.tokens[:4]))

    def close(self, state: DraftSequence) -> None:
        raise RuntimeError("not even that")

    def _fail_now_and_then(self) -> None:
        self._calls += 1
        if self._calls % 5 == 0:
            raise KeyError(self._calls)
