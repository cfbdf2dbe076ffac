"""The Triton KV writes and moves against their torch twins, in Triton's interpreter on the CPU."""

import pytest
import torch

from treeserve_kernels.kv import move_kv, write_kv


def _write(dtype, width):
    from treeserve_kernels.triton.kv import write_kv_triton

    cache = torch.randn(40, *width).to(dtype)
    slots, values = torch.randperm(40)[:13], torch.randn(13, *width).to(dtype)
    expected = cache.clone()
    write_kv(expected, slots, values)
    write_kv_triton(cache, slots, values)
    assert torch.equal(cache, expected)
    write_kv_triton(cache, slots[:0], values[:0])
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("width", [(1, 64), (3, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write_equals_twin(interpreter, dtype, width):
    interpreter(_write, dtype, width)


def _move(src, dst, width):
    from treeserve_kernels.triton.kv import move_kv_triton

    src, dst = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    cache = torch.randn(120, *width)
    expected = cache.clone()
    expected[dst] = cache[src]  # what a copy that reads everything first would leave
    twin = cache.clone()
    move_kv(twin, src, dst)
    move_kv_triton(cache, src, dst)
    assert torch.equal(cache, expected)
    assert torch.equal(cache, twin)


@pytest.mark.parametrize("width", [(1, 64), (3, 80)])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([7, 9, 12], [6, 7, 8]),
        ([2], [1]),
        (list(range(11, 111)), list(range(10, 110))),  # more than one tile, each source the next destination
        ([50, 53, 20, 22], [49, 50, 18, 20]),  # two sequences
        ([], []),
    ],
    ids=["gaps", "one", "shift", "sequences", "none"],
)
def test_move_equals_reading_everything_first(interpreter, src, dst, width):
    interpreter(_move, src, dst, width)


def _refusals():
    from treeserve_kernels.triton.kv import move_kv_triton, write_kv_triton

    cache, index = torch.zeros(8, 1, 4), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="do not fit"):
        write_kv_triton(cache, index, torch.zeros(3, 1, 4))
    with pytest.raises(ValueError, match="destinations"):
        move_kv_triton(cache, index, index[:1])
    with pytest.raises(ValueError, match="contiguous"):
        move_kv_triton(cache[..., :2], index, index)


def test_inputs_it_does_not_take_are_refused(interpreter):
    interpreter(_refusals)
