"""Row tiles: how rows are padded and split, and that row counts with other bits are found out."""

import pytest
import torch

from treeserve_engine.linear import Linear, RowTiles, find_row_tiles


@pytest.mark.parametrize(("rows", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8), (9, 16), (16, 16), (17, 20), (41, 48)])
def test_rows_are_padded_to_whole_tiles(rows, padded):
    assert RowTiles((4, 8, 16)).padded(rows) == padded


def test_padded_rows_split_into_tiles_that_exist():
    tiles = RowTiles((4, 8, 16))
    for rows in range(1, 100):
        parts = tiles.split(torch.arange(tiles.padded(rows)))
        assert all(len(part) in tiles.sizes for part in parts)
        assert torch.equal(torch.cat(parts), torch.arange(tiles.padded(rows)))


def test_without_tiles_nothing_is_padded_or_split():
    assert RowTiles(()).padded(7) == 7
    assert [len(part) for part in RowTiles(()).split(torch.zeros(7, 2))] == [7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_equals_torch_in_every_row_count(dtype):
    weight, bias = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
    layer = Linear(weight, bias)
    tiles = find_row_tiles([layer])
    for rows in (4, 12, 600):
        x = torch.randn(tiles.padded(rows), 40).to(dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(
            layer(x, tiles).double(), expected, rtol=1e-2, atol=1e-4 if dtype.itemsize == 4 else 0.1
        )


class _Fickle(Linear):
    """A layer whose bits change at some row counts, or with the row's place."""

    def __init__(self, bad_sizes: tuple[int, ...] = (), bad_place: int | None = None):
        super().__init__(torch.eye(8))
        self._bad_sizes, self._bad_place = bad_sizes, bad_place

    def tile(self, x):
        y = super().tile(x)
        if len(x) in self._bad_sizes:
            y = torch.nextafter(y, torch.tensor(torch.inf))
        if self._bad_place is not None and len(x) > self._bad_place:
            y[self._bad_place] = torch.nextafter(y[self._bad_place], torch.tensor(torch.inf))
        return y


def test_row_counts_with_other_bits_are_left_out():
    sound = Linear(torch.eye(12))
    everything = find_row_tiles([sound]).sizes
    tiles = find_row_tiles([sound, _Fickle(bad_sizes=(8, 256))])
    assert tiles.sizes == tuple(size for size in everything if size not in (8, 256))


def test_rows_are_computed_singly_where_their_place_matters():
    assert find_row_tiles([_Fickle(bad_place=2)]).sizes == (1,)
