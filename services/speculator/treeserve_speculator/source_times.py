"""What a tree of one source costs, measured."""

from __future__ import annotations

from treeserve_speculator.presets import DEPTHS, WIDTHS

_SMOOTHING = 0.15
_FAR_BELOW, _FALLS = 0.5, 0.5  # a first timing is often that of something else: caches to fill, a prompt to read
_OUTLIER = 2.0
_NARROWER = 0.9  # guess for a width that was never tried, relative to the wider one


class _Cell:
    """Seconds of one shape; before it was measured, those of a similar one times a ratio."""

    __slots__ = ("_like", "_ratio", "_seconds")

    def __init__(self, like: _Cell | None = None) -> None:
        self._seconds: float | None = None
        self._like, self._ratio = like, 1.0

    @property
    def measured(self) -> bool:
        return self._seconds is not None

    @property
    def seconds(self) -> float:
        if self._seconds is not None:
            return self._seconds
        return self._like.seconds * self._ratio if self._like is not None else 0.0

    def guess(self, like: _Cell, ratio: float) -> None:
        self._like, self._ratio = like, ratio

    def see(self, seconds: float) -> None:
        if self._seconds is None:
            self._seconds = seconds
            return
        weight = _FALLS if seconds < _FAR_BELOW * self._seconds else _SMOOTHING
        self._seconds += weight * (min(seconds, _OUTLIER * self._seconds) - self._seconds)


class SourceTimes:
    """Seconds that a source takes for each sequence it drafts for, by the tree's shape and how many there are at once.

    Shapes are given by their indices in WIDTHS and DEPTHS. What was never measured is guessed from its neighbours, as
    if time were proportional to depth.
    """

    def __init__(self) -> None:
        self.measured = 0
        self._tables: dict[int, list[list[_Cell]]] = {}

    def observe(self, width: int, depth: int, load: int, seconds: float) -> None:
        """A tree took so long while `load` sequences were drafted for."""
        self.measured += 1
        table = self._table(load)
        cell = table[width][depth]
        is_new = not cell.measured
        cell.see(seconds)
        if is_new:
            _guess_the_others(table)

    def seconds(self, width: int, load: int) -> list[float]:
        """Expected times by depth; 0 before anything was measured."""
        return [cell.seconds for cell in self._table(load)[width]]

    def largest_s(self, load: int) -> float:
        """Expected time of the widest and deepest tree; 0 before anything was measured."""
        return self._table(load)[-1][-1].seconds

    def _table(self, load: int) -> list[list[_Cell]]:
        bucket = load.bit_length()
        table = self._tables.get(bucket)
        if table is None:
            nearest = min(self._tables, key=lambda other: abs(other - bucket), default=None)
            if nearest is None:
                table = [[_Cell() for _ in DEPTHS] for _ in WIDTHS]
            else:
                table = [[_Cell(like) for like in row] for row in self._tables[nearest]]
            self._tables[bucket] = table
        return table


def _guess_the_others(table: list[list[_Cell]]) -> None:
    places = [(w, d) for w in range(len(WIDTHS)) for d in range(len(DEPTHS))]
    measured = [(w, d) for w, d in places if table[w][d].measured]
    for width, depth in places:
        if not table[width][depth].measured:
            w, d = min(measured, key=lambda place: (abs(place[0] - width), abs(place[1] - depth)))
            table[width][depth].guess(table[w][d], _NARROWER ** (w - width) * DEPTHS[depth] / DEPTHS[d])
