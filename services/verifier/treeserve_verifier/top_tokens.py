"""The tokens that the target held most probable, for drafters to learn from. Found late: no step waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

TOP_TOKENS = 8
_COLUMN = 64


class TopTokens(Sequence[int]):
    """Ids of the largest logits of a row, the largest first. They are found when somebody first looks at them."""

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self._logits: npt.NDArray[np.float32] | None = logits
        self._ids: tuple[int, ...] = ()

    def find(self) -> tuple[int, ...]:
        """Look, and let go of the logits."""
        if self._logits is not None:
            self._ids, self._logits = most_probable(self._logits), None
        return self._ids

    def __len__(self) -> int:
        return TOP_TOKENS

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.find()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.find())

    def __eq__(self, other: object) -> bool:
        return self.find() == (other.find() if isinstance(other, TopTokens) else other)

    __hash__ = None  # type: ignore[assignment]


def most_probable(logits: npt.NDArray[np.float32]) -> tuple[int, ...]:
    """Ids of the largest logits, largest first; equals in order of their ids, and at the edge any of them."""
    candidates = _columns_of_largest(logits)
    values = logits[candidates]
    largest = np.argpartition(values, -TOP_TOKENS)[-TOP_TOKENS:]
    order = np.lexsort((candidates[largest], -values[largest]))
    return tuple(int(i) for i in candidates[largest[order]])


def _columns_of_largest(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Ids among which the largest logits are: cut into columns, they lie in those with the largest maxima.

    One pass over the vocabulary takes a third of the time of partitioning it.
    """
    width = len(logits) // _COLUMN
    if width <= TOP_TOKENS:
        return np.arange(len(logits))
    table = logits[: width * _COLUMN].reshape(_COLUMN, width)
    columns = np.argpartition(table.max(axis=0), -TOP_TOKENS)[-TOP_TOKENS:]
    inside = columns[:, None] + width * np.arange(_COLUMN)
    return np.concatenate([inside.ravel(), np.arange(width * _COLUMN, len(logits))])
