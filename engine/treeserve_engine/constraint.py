"""What a sequence's grammar allows it to choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.processors import BoolArray


class Constraint(Protocol):
    """What a grammar allows after the tokens so far. It belongs to one sequence's sampler, which alone moves it."""

    def allowed(self) -> BoolArray:
        """Tokens that may come next, ends of the generation not among them: bool[vocab_size], read-only.

        Raises InvalidArgumentError if it cannot be said within bounds.
        """

    @property
    def may_end(self) -> bool:
        """Whether the generation may end here."""

    @property
    def is_complete(self) -> bool:
        """Whether it must."""

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises InvalidArgumentError if it is not allowed."""

    def forced(self) -> Sequence[int]:
        """Tokens that come next whatever the model says."""


def choices(constraint: Constraint, eos_token_ids: Sequence[int], blocked_ids: Sequence[int]) -> BoolArray:
    """The tokens that may be chosen next: bool[vocab_size].

    Args:
        eos_token_ids: may be chosen where the grammar may end.
        blocked_ids: are chosen only where nothing else is left.

    Raises:
        InvalidArgumentError: if no token may.
    """
    allowed = constraint.allowed()
    if constraint.may_end and eos_token_ids:
        allowed = allowed.copy()
        allowed[list(eos_token_ids)] = True
    if blocked_ids:
        others = allowed.copy()
        others[list(blocked_ids)] = False
        allowed = others if others.any() else allowed
    if not allowed.any():
        raise InvalidArgumentError("sampling.grammar", "allows no token of the vocabulary after the output so far")
    return allowed
