"""Checks what a source that is not built in answered, and counts why it was not used."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

from treeserve_core.errors import InvalidTreeError
from treeserve_core.tree import TokenTree

# More than any verifier takes. Pruning a tree of any size would hold up the other threads.
MAX_TREE_NODES = 4096


class RefusedTreeError(Exception):
    """An answer that is no tree to verify.

    Attributes:
        reason: one word, for metrics.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def checked_tree(answer: object, root_token: int, vocab_size: int) -> TokenTree:
    """The answer as a tree of plain numbers over the last committed token.

    What it says was drawn is left out: draws that are not what they claim would bias acceptance by `multi_step`, while
    tokens proposed outright never do.

    Raises:
        RefusedTreeError: if it is anything else.
    """
    if not isinstance(answer, TokenTree):
        raise RefusedTreeError("type", f"a {type(answer).__name__} is no TokenTree")
    if len(answer.token_ids) > MAX_TREE_NODES:
        raise RefusedTreeError("size", f"{len(answer.token_ids)} nodes")
    if answer.log_probs is None:
        raise RefusedTreeError("log_probs", "there are none")
    token_ids = plain_ids(answer.token_ids, vocab_size)
    if token_ids[0] != root_token:
        raise RefusedTreeError("root", f"{token_ids[0]} is not the last committed token {root_token}")
    try:
        log_probs = tuple(map(float, answer.log_probs))
        tree = TokenTree(token_ids, tuple(map(operator.index, answer.parents)), log_probs)
    except (InvalidTreeError, TypeError, ValueError) as error:
        raise RefusedTreeError("structure", str(error)) from error
    if not all(map(math.isfinite, log_probs)):
        raise RefusedTreeError("log_probs", "not all are finite")
    return tree


def plain_ids(token_ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    """Token ids as integers. Raises RefusedTreeError for anything else and for ids outside [0, vocab_size)."""
    try:
        plain = tuple(operator.index(token_id) for token_id in token_ids)  # type: ignore[arg-type]
    except TypeError as error:
        raise RefusedTreeError("token_ids", str(error)) from error
    if plain and not (min(plain) >= 0 and max(plain) < vocab_size):
        raise RefusedTreeError("token_ids", f"not all are in [0, {vocab_size})")
    return plain


def with_guesses(token_ids: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """A tree whose source gave no probabilities: those of siblings fall in the order in which they were named."""
    ranks: dict[int, int] = {}
    log_probs = [0.0]
    for parent in parents[1:]:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        log_probs.append(math.log(_RANK_PROBABILITIES[min(rank, len(_RANK_PROBABILITIES) - 1)]))
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))


# A rule of thumb. What is really accepted of a source is learnt by whoever weighs it against others.
_RANK_PROBABILITIES = (0.5, 0.2, 0.1, 0.05)
