"""KV writes and moves in plain torch against plain loops."""

import pytest
import torch

from treeserve_kernels.kv import move_kv, write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_write_touches_its_slots_only(dtype):
    cache = torch.randn(20, 2, 4).to(dtype)
    before, slots, values = cache.clone(), [3, 19, 0, 7], torch.randn(4, 2, 4)
    write_kv(cache, torch.tensor(slots), values)
    for slot in range(20):
        expected = values[slots.index(slot)].to(dtype) if slot in slots else before[slot]
        assert torch.equal(cache[slot], expected)


def test_write_takes_a_view_of_a_fused_projection():
    cache, fused = torch.zeros(5, 2, 4), torch.randn(3, 6, 4)
    write_kv(cache, torch.tensor([4, 1, 2]), fused[:, 4:])
    assert torch.equal(cache[[4, 1, 2]], fused[:, 4:])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([5, 6, 9], [4, 5, 6]),
        ([1], [0]),
        (list(range(1, 20)), list(range(19))),
        ([12, 14, 3, 5], [11, 12, 2, 3]),
        ([], []),
    ],
    ids=["gaps", "one", "shift", "two-sequences", "none"],
)
def test_move_equals_copying_in_order(src, dst):
    cache = torch.randn(20, 2, 4)
    expected = cache.clone()
    for s, d in zip(src, dst, strict=True):
        expected[d] = expected[s]
    move_kv(cache, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    assert torch.equal(cache, expected)
