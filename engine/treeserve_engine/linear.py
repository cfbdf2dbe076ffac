"""Linear layers whose rows have the same bits however many are computed together.

The result of a matrix product's row may depend on the number of rows, because libraries choose their kernel by shape.
On a CPU every product therefore runs on tiles of a few row counts that were seen, on this machine and for these
layers, to give each row the same bits in every place and beside every neighbour. Products of small whole numbers need
no tiles: their sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from treeserve_kernels.cpu.packing import GROUP_INPUTS, SMALLEST

_BASE_TILE = 4  # a single row would take another kernel, whose bits differ
_CANDIDATES = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256)
_PROBE_ROWS = 32
_TYPICAL_ROWS = 16  # the packed layout is chosen for this many
_THREADED_ELEMENTS = 32768  # torch splits an elementwise operation of this many between threads, anywhere in a row


def pieces_of_one_thread(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of [rows, N] in pieces so small that torch does not cut an elementwise operation between threads."""
    return torch.split(x, max(1, (_THREADED_ELEMENTS - 1) // x.shape[1]))


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


class Int8Linear:
    """x W^T + b as the native decoder computes it, bit for bit; slowly.

    Weights are int8 with a scale for each output. Inputs are rounded to int8 with a scale for each row and group of 64.
    The float32 sum over groups goes in order, multiplying and adding apart.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take weight int8[N, K], scales float32[N] and bias float32[N]."""
        padded = functional.pad(weight, (0, -weight.shape[1] % GROUP_INPUTS)).float()
        self._weight = padded.view(len(weight), -1, GROUP_INPUTS).permute(1, 2, 0).contiguous()  # [groups, 64, N]
        self._scales = scales
        self._bias = bias

    def __call__(self, x: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """Map [rows, K] to [rows, N]; any number of rows at once, whatever the tiles."""
        padded = functional.pad(x, (0, -x.shape[1] % GROUP_INPUTS)).view(len(x), -1, GROUP_INPUTS)
        largest = padded.abs().amax(-1, keepdim=True)
        scales = largest / 127
        inverse = torch.where(largest > SMALLEST, 127 / largest, 0.0)
        rounded = (padded * inverse).round_()
        y = x.new_zeros(len(x), self._weight.shape[2])
        for group, weight in enumerate(self._weight):
            y.add_((rounded[:, group] @ weight).mul_(scales[:, group]))
        y.mul_(self._scales)
        return y if self._bias is None else y.add_(self._bias)


@torch.inference_mode()
def find_row_tiles(layers: Iterable[Linear]) -> RowTiles:
    """The candidate row counts at which every layer gives a row the bits it has in a tile of `_BASE_TILE`.

    Layers of one shape behave alike and are tried once. Falls back to single rows, which depend on nothing. Without
    layers there is nothing to try and any row count will do.
    """
    distinct = {(layer.shape, layer.dtype): layer for layer in layers}.values()
    sizes: tuple[int, ...] = _CANDIDATES
    for layer in distinct:
        rows = torch.randn(_PROBE_ROWS, layer.shape[1], generator=torch.Generator().manual_seed(0)).to(layer.dtype)
        expected = torch.cat([layer.tile(part) for part in torch.split(rows, _BASE_TILE)])
        sizes = tuple(size for size in sizes if _agrees(layer, rows, expected, size))
    if not distinct:
        return RowTiles(())
    return RowTiles(sizes if _BASE_TILE in sizes else (1,))


def _agrees(layer: Linear, rows: torch.Tensor, expected: torch.Tensor, size: int) -> bool:
    order = (torch.arange(size) * 5 + 3) % len(rows)  # other places, other neighbours
    return torch.equal(layer.tile(rows[order]), expected[order])
