"""Tokens that a drafter drew at random for the children of one node, and the distribution it drew them from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidTreeError

MAX_DRAWS = 64
MAX_SUPPORT = 64
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Draws:
    """Independent draws from one distribution q, in the order in which they were drawn.

    Attributes:
        token_ids: at most MAX_DRAWS; a token drawn again is listed again.
        support: ids with a probability in q, different, at most MAX_SUPPORT.
        weights: their probabilities, each > 0. They sum to 1 within 1e-3: q is what they are after division by the sum.

    Raises:
        InvalidTreeError: if an invariant does not hold.
    """

    token_ids: tuple[int, ...]
    support: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= MAX_DRAWS:
            raise InvalidTreeError(f"{len(self.token_ids)} draws are outside [1, {MAX_DRAWS}]")
        if not 1 <= len(self.support) <= MAX_SUPPORT or len(self.support) != len(self.weights):
            raise InvalidTreeError(f"{len(self.support)} ids with {len(self.weights)} weights to draw from")
        if len(set(self.support)) != len(self.support) or min(self.support) < 0:
            raise InvalidTreeError("ids to draw from are negative or repeated")
        if not all(0.0 < weight < math.inf for weight in self.weights):  # also catches NaN
            raise InvalidTreeError("weights to draw with must be positive numbers")
        if abs(sum(self.weights) - 1.0) > _SUM_TOLERANCE:
            raise InvalidTreeError(f"weights to draw with sum to {sum(self.weights):g}, not 1")
        if not set(self.token_ids) <= set(self.support):
            raise InvalidTreeError("a drawn token has no weight")

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """`support` as int64[n]."""
        return np.array(self.support, dtype=np.int64)

    @cached_property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """q on `support`: float64[n], sums to 1."""
        weights = np.array(self.weights, dtype=np.float64)
        normalised: npt.NDArray[np.float64] = weights / weights.sum()
        return normalised

    def first(self, count: int) -> Draws | None:
        """The first `count` draws; None for none."""
        if count >= len(self.token_ids):
            return self
        return Draws(self.token_ids[:count], self.support, self.weights) if count > 0 else None


def draw_log_prob(rank: int) -> float:
    """A guess at the log-probability that draw number `rank` (from 0) of a node is the accepted one.

    It looks at nothing but the order. Whatever ranks or prunes draws goes by this: a draw that is dropped for the sake
    of the token it brought would bias the output.
    """
    return math.log(0.6 if rank == 0 else 0.4 * 0.5**rank)
