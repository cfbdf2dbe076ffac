"""Hidden states of the target, which drafters conditioned on them are sent: their shape, and the latest of a sequence.

Row i belongs to committed token i: it is what the target had computed when it chose that token, so it comes from the
position before. The first token of a prompt has none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Float16Array = npt.NDArray[np.float16]

_LARGEST = float(np.finfo(np.float16).max)
_WINDOW_TOKENS = 64
_WINDOW_BYTES = 262_144  # a quarter of the largest message


@dataclass(frozen=True)
class FeatureShape:
    """What a row holds: residual-stream vectors of `hidden_size` numbers after so many layers each, ascending."""

    layers: tuple[int, ...]
    hidden_size: int

    @classmethod
    def of_model(cls, num_layers: int, hidden_size: int) -> Self:
        """What verifiers export: low, middle and high layers as EAGLE-3 (Li et al., 2025) takes them, fewer if flat."""
        depths = {2, num_layers // 2, num_layers - 3}
        return cls(tuple(sorted(depth for depth in depths if 1 <= depth < num_layers)), hidden_size)

    @property
    def row_shape(self) -> tuple[int, int]:
        """Of one token."""
        return len(self.layers), self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Of one token, as float16."""
        return len(self.layers) * self.hidden_size * 2

    @property
    def window_tokens(self) -> int:
        """The latest tokens of a sequence whose features are kept and sent."""
        return max(1, min(_WINDOW_TOKENS, _WINDOW_BYTES // self.row_bytes))


@dataclass(frozen=True)
class FeatureRows:
    """Features of consecutive committed tokens.

    Attributes:
        first: place of the first one's token in prompt and output.
        values: float16[N, D, H].
    """

    first: int
    values: Float16Array

    @classmethod
    def narrowed(cls, first: int, values: npt.NDArray[np.float32]) -> Self:
        """From float32; what float16 cannot hold becomes its largest number."""
        return cls(first, np.clip(values, -_LARGEST, _LARGEST).astype(np.float16))


class FeatureWindow:
    """A sequence's latest features without a gap, at most `capacity` rows.

    Attributes:
        end: place of the token after the last one that has a row.
    """

    def __init__(self, capacity: int) -> None:
        self._rows: deque[Float16Array] = deque(maxlen=capacity)
        self.end = 0

    @property
    def start(self) -> int:
        """Place of the first token that has a row."""
        return self.end - len(self._rows)

    def extend(self, new: FeatureRows) -> None:
        """Take rows that came; those that are there already count once, and a gap makes the older ones useless."""
        if new.first > self.end:
            self._rows.clear()
            self.end = new.first
        self._rows.extend(new.values[self.end - new.first :])
        self.end = max(self.end, new.first + len(new.values))

    def since(self, first: int) -> FeatureRows | None:
        """The rows of token `first` and later ones, as far as they are there; None for none."""
        begin = max(first, self.start)
        if begin >= self.end:
            return None
        return FeatureRows(begin, np.stack([self._rows[i - self.start] for i in range(begin, self.end)]))
