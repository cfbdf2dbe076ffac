"""What a step costs: t(rows, prefill rows, context), measured at start-up and refined while running."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_MEASURED_ROWS = (1, 4, 8, 12, 16, 24, 32, 48, 64)
MOST_MEASURED_ROWS = _MEASURED_ROWS[-1]
MOST_MEASURED_CONTEXT = 1024
_CONTEXT_ROWS = 16
_FURTHER_ROWS = (96, 128, 192, 256)  # where rows are still cheap at MOST_MEASURED_ROWS, as on a GPU
_CHEAP = 0.5  # of what they would cost in proportion
_ENOUGH_MS = 40.0  # timing one count of rows
_TURNS = 2, 4  # at least, at most
_SMOOTHING = 0.1
_TIMED = 0.5  # a start-up timing, taken while a cluster starts, counts as much as one step
_PROVED = 0.2  # after three steps: the first one may have been held up
_FORGOTTEN = 0.001  # of what is known of a stair, with each step below it
_MOST_SURPRISE = 2.5  # one outlier must not distort the table
_AGES_MS = 1e9
_LEAST_ROW_SHARE = 1e-4  # of a one-row step: a price of 0 could never be corrected


@dataclass(frozen=True)
class Prices:
    """What plain decoding pays, and what a draft node does.

    Attributes:
        token_s: seconds of a step for each of its sequences, t(b) / b.
        row: cost of one more row for each of them, in tokens: (t(2 b) - t(b)) / t(b).
        node: the least that a draft node costs when each of them has n, in tokens: min of (t(b + n b) - t(b)) / n t(b).
    """

    token_s: float
    row: float
    node: float = 0.0


class CostModel:
    """Milliseconds of a step: a staircase in its rows with logits, and a straight line in its prefill rows.

    Rows are computed in tiles, so a step costs what the next measured count of rows costs; beyond the table it grows in
    proportion to the rows. Stairs never fall, because more rows never cost less. A prefill row costs `prefill_row_ms`,
    and `attend_ms` more for every KV position that it attends to.

    An observed step pulls its stair, and all others half as much: most of what changes (a busy neighbour, a longer
    context) slows every step alike. A step with prefill rows pulls their price instead. A stair that was timed at
    start-up is replaced by the mean of its first steps. What is known of it is forgotten while steps have fewer rows:
    it goes back to being as much dearer than they are as it was at first. Otherwise rows that seemed too dear once
    would never be tried again.

    Args:
        table: milliseconds by rows.
        prefill_row_ms: None for what a row of the largest stair costs.
    """

    def __init__(self, table: Mapping[int, float], prefill_row_ms: float | None = None, attend_ms: float = 0.0) -> None:
        if not table or any(ms <= 0 for ms in table.values()):
            raise ValueError("a cost table needs at least one positive entry")
        self._rows = sorted(table)
        self._ms = [table[rows] for rows in self._rows]
        self._first_weight = _SMOOTHING
        self._weights = [_SMOOTHING] * len(table)  # of the next step of each stair
        self._make_monotone()
        self._first_ms = tuple(self._ms)
        self._prefill_row_ms = self._ms[-1] / self._rows[-1] if prefill_row_ms is None else prefill_row_ms
        self._attend_ms = attend_ms
        self._prices: dict[int, Prices] = {}  # by decoding sequences, since the last step that was observed

    @classmethod
    def measure(
        cls,
        time_ms: Callable[[int], float],
        time_prefill_ms: Callable[[int, int], float] | None = None,
        most_context: int = 0,
        most_rows: int = MOST_MEASURED_ROWS,
    ) -> CostModel:
        """Build the table from `time_ms(rows)`, for each entry of _MEASURED_ROWS and further ones while rows are cheap.

        Other processes start at the same time, and passes become slower and faster with what these do. So a stair is
        timed beside a pass of one row, two to four times, a short one more often, and the ratio in the middle counts.
        Fewer rows cost no more than more rows did.

        Args:
            time_prefill_ms: duration of a pass of so many rows, without logits, after so many KV positions.
            most_context: positions that it may be asked for; 0 leaves the cost of context to what is observed.
            most_rows: rows of a step.
        """
        time_ms(MOST_MEASURED_ROWS)  # the first pass pays for allocations
        ones: list[float] = []
        taken = dict.fromkeys(_MEASURED_ROWS, 0.0)
        ratios = {1: [1.0]} | {rows: [] for rows in _MEASURED_ROWS[1:]}
        for turn in range(_TURNS[1]):
            for rows in _MEASURED_ROWS[1:]:
                if turn < _TURNS[0] or taken[rows] < _ENOUGH_MS:
                    ones.append(time_ms(1))
                    ms = time_ms(rows)
                    taken[rows] += ms
                    ratios[rows].append(ms / ones[-1])
        middle = {rows: statistics.median_low(each) for rows, each in ratios.items()}
        for rows in _FURTHER_ROWS:
            (before, less), (last, more) = list(middle.items())[-2:]
            if rows > most_rows or more / less - 1.0 > _CHEAP * (last / before - 1.0):
                break
            time_ms(rows)
            middle[rows] = min(time_ms(rows) / time_ms(1) for _ in range(_TURNS[0]))
        table = {rows: min(ones) * min(middle[more] for more in middle if more >= rows) for rows in middle}
        cost = cls._timed(table, time_prefill_ms, most_context)
        cost._first_weight = _TIMED
        cost._weights = [_TIMED] * len(table)
        return cost

    @classmethod
    def _timed(
        cls, table: Mapping[int, float], time_prefill_ms: Callable[[int, int], float] | None, most_context: int
    ) -> CostModel:
        if time_prefill_ms is None:
            return cls(table)
        prefill = _fastest(lambda rows: time_prefill_ms(rows, 0), MOST_MEASURED_ROWS)
        row_ms = max((prefill - table[1]) / MOST_MEASURED_ROWS, _LEAST_ROW_SHARE * table[1])
        if most_context < 1:
            return cls(table, row_ms)
        fresh = _fastest(lambda rows: time_prefill_ms(rows, 0), _CONTEXT_ROWS)
        later = _fastest(lambda rows: time_prefill_ms(rows, most_context), _CONTEXT_ROWS)
        return cls(table, row_ms, max(0.0, later - fresh) / (_CONTEXT_ROWS * most_context))

    @classmethod
    def free_rows(cls) -> CostModel:
        """Steps that take ages, however many rows they have: all that is drafted is worth waiting for and verifying."""
        return cls({1: _AGES_MS, 2**31: _AGES_MS}, prefill_row_ms=0.0)

    @property
    def table(self) -> dict[int, float]:
        """Rows to milliseconds."""
        return dict(zip(self._rows, self._ms, strict=True))

    def is_proved(self, rows: int) -> bool:
        """Whether the expected duration of a step with so many rows with logits is what such steps took lately.

        Beyond the table nothing is observed, and what it says is taken for granted.
        """
        stair = bisect.bisect_left(self._rows, rows)
        return stair >= len(self._rows) or self._weights[stair] <= _PROVED

    def step_ms(self, rows: int) -> float:
        """Expected duration of a step with so many rows with logits and no other."""
        stair = bisect.bisect_left(self._rows, rows)
        if stair < len(self._rows):
            return self._ms[stair]
        return self._ms[-1] * rows / self._rows[-1]

    def prices(self, decoding: int) -> Prices:
        """What tokens and rows cost while so many sequences decode."""
        known = self._prices.get(decoding)
        if known is None:
            known = self._prices[decoding] = self._priced(max(decoding, 1))
        return known

    def _priced(self, roots: int) -> Prices:
        step_ms = self.step_ms(roots)
        row = self.step_ms(2 * roots) / step_ms - 1.0
        # A stair's last row is its cheapest.
        stairs = ((rows / roots - 1.0, ms / step_ms - 1.0) for rows, ms in zip(self._rows, self._ms, strict=True))
        node = min((cost / nodes for nodes, cost in stairs if nodes >= 1.0), default=row)
        return Prices(step_ms / roots / 1e3, row, max(0.0, node))

    def prefill_ms(self, rows: int, context: int) -> float:
        """What a step takes longer by for a prefill chunk of so many rows after so many KV positions."""
        return self._prefill_ms(rows, rows * (context + rows / 2.0))

    def prefill_rows_within(self, ms: float, most: int, context: int) -> int:
        """How many prefill rows after so many KV positions lengthen a step by no more than `ms`; `most` at most."""
        return bisect.bisect_right(range(1, most + 1), ms, key=lambda rows: self.prefill_ms(rows, context))

    def observe(self, rows: int, ms: float, prefill_rows: int = 0, attended: float = 0.0) -> None:
        """Take one finished step into account. Those beyond the table are left out, unless they have prefill rows.

        Args:
            rows: rows with logits.
            attended: KV positions that a prefill row attends to, summed over all of them.
        """
        if ms <= 0:
            return
        self._prices.clear()
        surprise = min(ms / (self.step_ms(rows) + self._prefill_ms(prefill_rows, attended)), _MOST_SURPRISE) - 1.0
        change = _SMOOTHING * surprise
        stair = bisect.bisect_left(self._rows, rows)
        if prefill_rows:
            self._prefill_row_ms *= 1.0 + change
            self._attend_ms *= 1.0 + change
        elif stair < len(self._rows):
            weight = self._weights[stair]
            self._weights[stair] = max(_SMOOTHING, weight / (1.0 + weight))
            change = weight * surprise
            self._ms = [t * (1.0 + (change if i == stair else change / 2.0)) for i, t in enumerate(self._ms)]
            self._forget(stair)
            self._make_monotone()

    def _prefill_ms(self, rows: int, attended: float) -> float:
        return rows * self._prefill_row_ms + attended * self._attend_ms

    def _forget(self, stair: int) -> None:
        """A step took this stair: what is known of those above it gets older."""
        for i in range(stair + 1, len(self._ms)):
            first_ms = self._ms[stair] * self._first_ms[i] / self._first_ms[stair]
            self._ms[i] += _FORGOTTEN * (first_ms - self._ms[i])
            self._weights[i] += _FORGOTTEN * (self._first_weight - self._weights[i])

    def _make_monotone(self) -> None:
        for i in range(1, len(self._ms)):
            self._ms[i] = max(self._ms[i], self._ms[i - 1])


def _fastest(time_ms: Callable[[int], float], rows: int) -> float:
    timings = [time_ms(rows), time_ms(rows)]
    if sum(timings) < _ENOUGH_MS:
        timings.append(time_ms(rows))
    return min(timings)
