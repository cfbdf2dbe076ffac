"""The tokens that the target held most probable, for drafters to learn from. Found late: no step waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from treeserve_engine.largest import find_largest

TOP_TOKENS = 8


class TopTokens(Sequence[int]):
    """Ids of the largest logits of a row, the largest first. They are found when somebody first looks at them."""

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self._logits: npt.NDArray[np.float32] | None = logits
        self._ids: tuple[int, ...] = ()

    def find(self) -> tuple[int, ...]:
        """Look, and let go of the logits."""
        if self._logits is not None:
            self._ids, self._logits = tuple(find_largest(self._logits, TOP_TOKENS) or ()), None
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
