"""Ragged lists of tokens with probabilities, many at once: flat arrays and where each list ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Lists:
    """Tokens with probabilities for each of a number of groups.

    Attributes:
        ends: int64[groups], where each group's entries end; they begin where the last one's end.
        token_ids: int32[entries].
        probabilities: float32[entries].
    """

    ends: IntArray
    token_ids: npt.NDArray[np.int32]
    probabilities: FloatArray

    @property
    def lengths(self) -> IntArray:
        """Entries of each group: int64[groups]."""
        return np.diff(self.ends, prepend=0)

    @property
    def groups(self) -> IntArray:
        """Each entry's group: int64[entries]."""
        return np.repeat(np.arange(len(self.ends)), self.lengths)

    @property
    def ranks(self) -> IntArray:
        """Each entry's place in its group: int64[entries]."""
        return np.arange(len(self.token_ids)) - np.repeat(self.ends - self.lengths, self.lengths)

    def of(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """For each of `groups`, in order: its place among them and where its entries are, both int64[entries]."""
        lengths = self.lengths[groups]
        ends = np.cumsum(lengths)
        place = np.repeat(np.arange(len(groups)), lengths)
        return place, np.arange(len(place)) + np.repeat(self.ends[groups] - ends, lengths)

    def subset(self, kept: npt.NDArray[np.bool_]) -> Lists:
        """Without some entries."""
        before = np.append(0, np.cumsum(kept))
        return Lists(before[self.ends], self.token_ids[kept], self.probabilities[kept])

    def most_probable(self, count: int) -> Lists:
        """The `count` most probable of each group, the most probable first."""
        order = np.lexsort((-self.probabilities, self.groups))
        ranked = Lists(self.ends, self.token_ids[order], self.probabilities[order])
        return ranked.subset(ranked.ranks < count)


def summed(keys: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """The different keys, ascending, and the sum of each one's values."""
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return keys[starts], np.add.reduceat(values[order], starts)


def looked_up(wanted: IntArray, keys: IntArray, values: FloatArray, otherwise: float) -> FloatArray:
    """The value of each wanted key, or `otherwise`. The keys are different, in any order, and at least one."""
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], np.float32(otherwise))
