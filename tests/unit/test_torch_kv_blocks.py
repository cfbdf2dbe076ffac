"""Blocks of the torch models' KV cache copied out and in: all layers, whatever their widths, nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treeserve_engine.kv_cache import KvCache

SIZE, BLOCKS = 4, 5


def cache(dtype: torch.dtype, spare_slots: int = 0) -> KvCache:
    """Two layers of different widths, of random numbers."""
    generator = torch.Generator().manual_seed(3)

    def tensors(*widths: int) -> tuple[torch.Tensor, ...]:
        slots = SIZE * BLOCKS + spare_slots
        return tuple(torch.randn((slots, 2, width), generator=generator).to(dtype) for width in widths)

    return KvCache(tensors(6, 3), tensors(6, 5), SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spare_slots", [0, 1])
def test_a_block_moves_between_caches_to_the_bit(dtype: torch.dtype, spare_slots: int) -> None:
    source, target = cache(dtype, spare_slots), cache(dtype, spare_slots)
    before = [t.clone() for t in (*target.keys, *target.values)]
    assert source.block_nbytes == SIZE * 2 * (6 + 3 + 6 + 5) * dtype.itemsize
    data = np.zeros(source.block_nbytes, np.uint8)
    source.save(1, data)
    target.load(BLOCKS - 1, data)
    for ours, theirs, old in zip((*target.keys, *target.values), (*source.keys, *source.values), before, strict=True):
        start = SIZE * (BLOCKS - 1)
        assert torch.equal(ours[start : start + SIZE], theirs[SIZE : 2 * SIZE])
        assert torch.equal(ours[:start], old[:start]) and torch.equal(ours[start + SIZE :], old[start + SIZE :])


@pytest.mark.parametrize("what", ["save", "load"])
def test_wrong_blocks_and_arrays_are_refused(what: str) -> None:
    kv = cache(torch.float32, spare_slots=1)
    right = np.zeros(kv.block_nbytes, np.uint8)
    for block in (-1, BLOCKS):
        with pytest.raises(ValueError, match="there is no block"):
            getattr(kv, what)(block, right)
    for data in (right[1:], right[None], right.view(np.int8)):
        with pytest.raises(ValueError, match="instead of uint8"):
            getattr(kv, what)(0, data)
