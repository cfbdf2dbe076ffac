"""Writing new KV rows to their slots and moving accepted ones, as Triton kernels."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows moved at once, and elements of a row per program: a tile that fits in the registers of four warps.
MOVES_PER_TILE = 32
MOVE_WIDTH = 128


@triton.jit
def write_kernel(cache, slots, values, width, width_block: tl.constexpr):
    """Copies row i of values to row slots[i] of the cache."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width_block)
    mask = columns < width
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(cache + slot * width + columns, tl.load(values + row * width + columns, mask=mask), mask=mask)


@triton.jit
def move_kernel(cache, src, dst, num_moves, width, moves_per_tile: tl.constexpr, move_width: tl.constexpr):
    """Copies row src[i] of the cache to row dst[i] for a strip of columns, in the order of i.

    A destination is never a later move's source, so a tile of moves may be read whole before it is written; the
    barriers keep another thread's write from overtaking a read, within a tile and from one tile to the next.
    """
    columns = tl.program_id(0) * move_width + tl.arange(0, move_width)
    for start in range(0, num_moves, moves_per_tile):
        moves = start + tl.arange(0, moves_per_tile)
        is_move = moves < num_moves
        mask = is_move[:, None] & (columns < width)[None, :]
        sources = tl.load(src + moves, mask=is_move, other=0).to(tl.int64)
        destinations = tl.load(dst + moves, mask=is_move, other=0).to(tl.int64)
        rows = tl.load(cache + sources[:, None] * width + columns[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(cache + destinations[:, None] * width + columns[None, :], rows, mask=mask)
        tl.debug_barrier()


def write_kv_triton(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values [n, KVH, D] to the distinct `slots` [n] of the contiguous cache [num_slots, KVH, D], in place.

    Raises:
        ValueError: if the cache is not contiguous or the shapes do not fit.
    """
    _check(cache)
    if values.shape != (len(slots), *cache.shape[1:]):
        raise ValueError(f"values {tuple(values.shape)} do not fit {len(slots)} slots of a cache {tuple(cache.shape)}")
    if len(slots) == 0:
        return
    width = cache[0].numel()
    width_block = triton.next_power_of_2(width)
    write_kernel[(len(slots),)](cache, slots, values.contiguous(), width, width_block, enable_fp_fusion=False)


def move_kv_triton(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Moves the cache's rows `src` [n] to `dst` [n] in place, as a forward copy.

    Safe where no destination is the source of a later move: so it is when each sequence's sources ascend in position
    and none lies before its destination.

    Raises:
        ValueError: if the cache is not contiguous or the lengths differ.
    """
    _check(cache)
    if src.shape != dst.shape:
        raise ValueError(f"{len(src)} sources but {len(dst)} destinations")
    if len(src) == 0:
        return
    width = cache[0].numel()
    grid = (triton.cdiv(width, MOVE_WIDTH),)
    move_kernel[grid](cache, src, dst, len(src), width, MOVES_PER_TILE, MOVE_WIDTH, enable_fp_fusion=False)


def _check(cache: torch.Tensor) -> None:
    if not cache.is_contiguous():
        raise ValueError("the KV cache must be contiguous")
