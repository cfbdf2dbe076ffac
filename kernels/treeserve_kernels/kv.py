"""Writing new KV rows to their slots and moving accepted ones, in plain torch."""

from __future__ import annotations

import torch


def write_kv(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write row i of `values` to row `slots[i]` of `cache`.

    Args:
        cache: [num_slots, KVH, D].
        slots: int64[n], distinct.
        values: [n, KVH, D], rounded to the cache's dtype.
    """
    cache.index_copy_(0, slots, values.to(cache.dtype))


def move_kv(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy row `src[i]` of `cache` to row `dst[i]`, as if in the order of i.

    Sources ascend and `src[i] >= dst[i]` within a sequence's KV positions, so no destination is a later source, and
    reading everything first is the same.

    Args:
        cache: [num_slots, KVH, D].
        src: int64[n].
        dst: int64[n], distinct.
    """
    cache.index_copy_(0, dst, cache.index_select(0, src))
