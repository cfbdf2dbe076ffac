"""What a step costs: t(rows), measured at start-up and refined while running."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping

_MEASURED_ROWS = (1, 4, 8, 12, 16, 24, 32, 48, 64)
MOST_MEASURED_ROWS = _MEASURED_ROWS[-1]
_ENOUGH_MS = 50.0  # timing one count of rows
_SMOOTHING = 0.1
_AGES_MS = 1e9


class CostModel:
    """Milliseconds of a forward pass as a function of its rows: a staircase.

    Rows are computed in tiles, so a step costs what the next measured count of rows costs; beyond the table the last
    slope goes on. An observed step pulls its stair, and all others half as much: most of what changes (a busy
    neighbour, a longer context) slows every step alike. Stairs never fall, because more rows never cost less.
    """

    def __init__(self, table: Mapping[int, float]) -> None:
        if not table or any(ms <= 0 for ms in table.values()):
            raise ValueError("a cost table needs at least one positive entry")
        self._rows = sorted(table)
        self._ms = [table[rows] for rows in self._rows]
        self._make_monotone()

    @classmethod
    def measure(cls, time_ms: Callable[[int], float]) -> CostModel:
        """Build the table from `time_ms(rows)`: for each entry of _MEASURED_ROWS the fastest of two timings or three.

        What disturbs a timing only ever adds to it, and to a short one the most.
        """
        time_ms(MOST_MEASURED_ROWS)  # the first pass pays for allocations
        return cls({rows: _fastest(time_ms, rows) for rows in _MEASURED_ROWS})

    @classmethod
    def free_rows(cls) -> CostModel:
        """Steps that take ages, however many rows they have: all that is drafted is worth waiting for and verifying."""
        return cls({1: _AGES_MS, 2**31: _AGES_MS})

    @property
    def table(self) -> dict[int, float]:
        """Rows to milliseconds."""
        return dict(zip(self._rows, self._ms, strict=True))

    def step_ms(self, rows: int) -> float:
        """Expected duration of a step with this many rows."""
        stair = bisect.bisect_left(self._rows, rows)
        if stair < len(self._rows):
            return self._ms[stair]
        return self._ms[-1] * rows / self._rows[-1]

    def observe(self, rows: int, ms: float) -> None:
        """Take one finished step into account. Steps beyond the table (big prefills) are left out."""
        stair = bisect.bisect_left(self._rows, rows)
        if stair == len(self._rows) or ms <= 0:
            return
        change = _SMOOTHING * (min(ms / self._ms[stair], 2.5) - 1.0)  # one outlier must not distort the table
        self._ms = [t * (1.0 + (change if i == stair else change / 2.0)) for i, t in enumerate(self._ms)]
        self._make_monotone()

    def _make_monotone(self) -> None:
        for i in range(1, len(self._ms)):
            self._ms[i] = max(self._ms[i], self._ms[i - 1])


def _fastest(time_ms: Callable[[int], float], rows: int) -> float:
    timings = [time_ms(rows), time_ms(rows)]
    if sum(timings) < _ENOUGH_MS:
        timings.append(time_ms(rows))
    return min(timings)
