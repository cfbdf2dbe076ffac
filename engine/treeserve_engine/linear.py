"""Linear layers whose rows have the same bits however many are computed together.

The result of a matrix product's row may depend on the number of rows, because libraries choose their kernel by shape.
On a CPU every product therefore runs on tiles of a few row counts that were seen, on this machine and for these
layers, to give each row the same bits in every place and beside every neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

_BASE_TILE = 4  # a single row would take another kernel, whose bits differ
_CANDIDATES = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256)
_PROBE_ROWS = 32
_TYPICAL_ROWS = 16  # the packed layout is chosen for this many


@dataclass(frozen=True)
class RowTiles:
    """Row counts that may be computed together, ascending; none if any number may, which is not exact."""

    sizes: tuple[int, ...]

    def padded(self, rows: int) -> int:
        """The row count to which `rows` must be padded: as many of the largest tile as fit, then one for the rest."""
        if not self.sizes:
            return rows
        whole = rows // self.sizes[-1] * self.sizes[-1]
        rest = rows - whole
        return whole + (next(size for size in self.sizes if size >= rest) if rest else 0)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tiles of `x`, whose row count is padded."""
        return torch.split(x, self.sizes[-1]) if self.sizes else (x,)


class Linear:
    """x W^T + b. On a CPU the weight is repacked once for oneDNN, which reads it at the speed of the memory."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take weight [N, K] and bias [N]."""
        self.shape = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS) if self._packed else weight

    def __call__(self, x: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """Map [rows, K] to [rows, N]; `tiles` has padded the rows."""
        parts = [self.tile(part) for part in tiles.split(x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tile(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, K] to [rows, N] in one call."""
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)


@torch.inference_mode()
def find_row_tiles(layers: Iterable[Linear]) -> RowTiles:
    """The candidate row counts at which every layer gives a row the bits it has in a tile of `_BASE_TILE`.

    Layers of one shape behave alike and are tried once. Falls back to single rows, which depend on nothing.
    """
    distinct = {(layer.shape, layer.dtype): layer for layer in layers}.values()
    sizes: tuple[int, ...] = _CANDIDATES
    for layer in distinct:
        rows = torch.randn(_PROBE_ROWS, layer.shape[1], generator=torch.Generator().manual_seed(0)).to(layer.dtype)
        expected = torch.cat([layer.tile(part) for part in torch.split(rows, _BASE_TILE)])
        sizes = tuple(size for size in sizes if _agrees(layer, rows, expected, size))
    return RowTiles(sizes if _BASE_TILE in sizes else (1,))


def _agrees(layer: Linear, rows: torch.Tensor, expected: torch.Tensor, size: int) -> bool:
    order = (torch.arange(size) * 5 + 3) % len(rows)  # other places, other neighbours
    return torch.equal(layer.tile(rows[order]), expected[order])
