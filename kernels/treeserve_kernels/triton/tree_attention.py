"""Tree attention over paged KV as Triton kernels: a shared prefix and an ancestor-masked tree in one online softmax.

A program takes one tile of a sequence's query rows for one KV head. The rows of a tile are (query, head) pairs: all
query heads that share the KV head are packed together, so a prefix tile of K and V is read once for the whole tree
and the whole head group. Long prefixes are cut at fixed positions into splits which run side by side; the split that
holds the end of the prefix also attends to the tree, and a second kernel merges the splits by log-sum-exp.

The order in which a row's keys are summed depends on its own sequence alone: splits and KV tiles start at fixed
positions of the sequence whatever else is in the batch. It does depend on where the prefix ends and which nodes lie
beside the row, and the batch chooses the row tile and with it the matrix instruction. So a token's bits can differ
between a decode step and a tree: this kernel is not for exact mode.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from treeserve_kernels.tree_attention import TreeAttentionMeta

# A KV tile of the tree is exactly one ancestor word of every row; the prefix uses the same size.
KV_TILE = 64
# Rows of a tile: the smallest matrix-unit tile for decode steps and small trees, a large one for prefill chunks.
SMALL_TILE_ROWS = 16
LARGE_TILE_ROWS = 64
# Long enough to pay for the merge, short enough that one long sequence occupies many processors.
SPLIT_POSITIONS = 1024
# Rows, each a (query, head) pair, that one program of the merge takes.
MERGE_ROWS = 16

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_SEQUENCES_PER_SCAN = tl.constexpr(64)
_KV_TILE = tl.constexpr(KV_TILE)


@triton.jit
def _find_sequence(query_offsets, tile, num_sequences, group: tl.constexpr, tile_rows: tl.constexpr):
    """The sequence to which tile number `tile` belongs.

    Sequence s owns the tile numbers from query_offsets[s] * group // tile_rows + s on. The "+ s" gives every sequence
    room for its last, partly filled tile, so the first numbers ascend strictly and no prefix sum is needed.
    """
    sequence = -1
    for start in range(0, num_sequences, _SEQUENCES_PER_SCAN):
        candidates = start + tl.arange(0, _SEQUENCES_PER_SCAN)
        exists = candidates < num_sequences
        offsets = tl.load(query_offsets + candidates, mask=exists, other=0)
        first_tiles = offsets * group // tile_rows + candidates
        sequence += tl.sum((exists & (first_tiles <= tile)).to(tl.int32), 0)
    return sequence


@triton.jit
def _load_kv(
    k_cache, v_cache, block_table, positions, exists, kv_head, num_kv_heads,
    block_size: tl.constexpr, head_dim: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """K and V [positions, head_block] of one KV head through the block table; zeros where nothing exists."""
    blocks = tl.load(block_table + positions // block_size, mask=exists, other=0).to(tl.int64)
    slots = blocks * block_size + positions % block_size
    dims = tl.arange(0, head_block)
    offsets = (slots * num_kv_heads + kv_head)[:, None] * head_dim + dims[None, :]
    mask = exists[:, None] & (dims < head_dim)[None, :]
    return tl.load(k_cache + offsets, mask=mask, other=0.0), tl.load(v_cache + offsets, mask=mask, other=0.0)


@triton.jit
def _dot(a, b, precision: tl.constexpr):
    """a @ b summed in float32; "widened" also multiplies in float32, which is the same for bfloat16 operands."""
    if precision == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=precision)


@triton.jit
def _attend(q, k, v, visible, scale_log2, peak, total, acc, precision: tl.constexpr):
    """One step of the online softmax (base 2) over a KV tile: the new peak score, total weight and weighted sum."""
    scores = _dot(q, tl.trans(k), precision) * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + _dot(weights.to(v.dtype), v, precision)
    return new_peak, total, acc


@triton.jit
def attention_kernel(
    q_ptr, k_cache, v_cache, out_ptr, lse_ptr,
    block_tables, context_lens, query_offsets, node_offsets, ancestor_words,
    scale_log2, num_sequences, num_rows, num_kv_heads, table_width, num_words,
    block_size: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, head_block: tl.constexpr,
    tile_rows: tl.constexpr, split_positions: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Attention of one row tile, KV head and split: out [splits, T, H, D] and log2-sum-exp2 [splits, T, H]."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = _find_sequence(query_offsets, tile, num_sequences, group, tile_rows)
    first_query = tl.load(query_offsets + sequence)
    num_queries = tl.load(query_offsets + sequence + 1) - first_query
    first_rank = (tile - first_query * group // tile_rows - sequence) * tile_rows
    context_len = tl.load(context_lens + sequence)
    last_split = tl.maximum(context_len - 1, 0) // split_positions
    if first_rank >= num_queries * group or split > last_split:
        return

    ranks = first_rank + tl.arange(0, tile_rows)
    is_row = ranks < num_queries * group
    queries = first_query + ranks // group
    rows = queries * (num_kv_heads * group) + kv_head * group + ranks % group
    dims = tl.arange(0, head_block)
    offsets = rows[:, None].to(tl.int64) * head_dim + dims[None, :]
    mask = is_row[:, None] & (dims < head_dim)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    # A finite start keeps tiles in which a row sees nothing free of inf - inf.
    peak = tl.full([tile_rows], _LOWEST, tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    acc = tl.zeros([tile_rows, head_block], tl.float32)
    block_table = block_tables + sequence.to(tl.int64) * table_width
    steps = tl.arange(0, _KV_TILE)

    prefix_end = tl.minimum(context_len, (split + 1) * split_positions)
    for start in range(split * split_positions, prefix_end, _KV_TILE):
        positions = start + steps
        exists = positions < prefix_end
        k, v = _load_kv(
            k_cache, v_cache, block_table, positions, exists, kv_head, num_kv_heads, block_size, head_dim, head_block
        )
        peak, total, acc = _attend(q, k, v, exists[None, :], scale_log2, peak, total, acc, precision)

    # Parents precede their children: no row of the tile sees a node past its last query.
    last_query = tl.minimum(num_queries - 1, (first_rank + tile_rows - 1) // group)
    num_nodes = tl.load(node_offsets + sequence) + last_query + 1
    num_nodes = tl.where(split == last_split, num_nodes, 0)
    for start in range(0, num_nodes, _KV_TILE):
        nodes = start + steps
        exists = nodes < num_nodes
        word_offsets = queries.to(tl.int64) * num_words + start // _KV_TILE
        # Filler rows past the last query see the first node, so that no row's sum is empty.
        words = tl.load(ancestor_words + word_offsets, mask=is_row, other=1)
        visible = ((words[:, None] >> steps[None, :].to(tl.int64)) & 1 != 0) & exists[None, :]
        positions = context_len + nodes
        k, v = _load_kv(
            k_cache, v_cache, block_table, positions, exists, kv_head, num_kv_heads, block_size, head_dim, head_block
        )
        peak, total, acc = _attend(q, k, v, visible, scale_log2, peak, total, acc, precision)

    split_start = split.to(tl.int64) * num_rows
    out = acc / total[:, None]
    tl.store(out_ptr + split_start * head_dim + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + split_start + rows, peak + tl.log2(total), mask=is_row)


@triton.jit
def merge_kernel(
    split_out_ptr, split_lse_ptr, out_ptr, num_splits, num_rows,
    head_dim: tl.constexpr, head_block: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Weighs the splits' outputs of a tile of rows by their log2-sum-exp2; a split that did not run carries -inf.

    Splits are summed in order, so empty ones at the end do not change a bit.
    """
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    dims = tl.arange(0, head_block)
    is_row = rows < num_rows
    mask = is_row[:, None] & (dims < head_dim)[None, :]
    peak = tl.full([tile_rows], _LOWEST, tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    acc = tl.zeros([tile_rows, head_block], tl.float32)
    for split in range(num_splits):
        split_rows = rows + split * num_rows
        lse = tl.load(split_lse_ptr + split_rows, mask=is_row, other=0.0)
        ran = mask & (lse > float("-inf"))[:, None]
        part = tl.load(split_out_ptr + split_rows[:, None] * head_dim + dims[None, :], mask=ran, other=0.0)
        new_peak = tl.maximum(peak, lse)
        shrink, weight = tl.exp2(peak - new_peak), tl.exp2(lse - new_peak)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * part
        peak = new_peak
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * head_dim + dims[None, :], out, mask=mask)


@dataclass(frozen=True)
class LaunchPlan:
    """How one call is cut into programs, from host-known sizes alone: no tensor is read back."""

    tile_rows: int
    num_tiles: int
    num_splits: int

    @classmethod
    def of(
        cls, dtype: torch.dtype, num_queries: int, group: int, meta: TreeAttentionMeta, split_positions: int
    ) -> Self:
        """Bounds every sequence by its row of the block table; programs past a sequence's own end return at once."""
        num_sequences, table_width = meta.block_tables.shape
        rows = num_queries * group
        choices = tile_row_choices(dtype)
        tile_rows = choices[0] if rows <= choices[0] * num_sequences else choices[-1]
        num_splits = max(1, math.ceil(table_width * meta.block_size / split_positions))
        return cls(tile_rows, rows // tile_rows + num_sequences, num_splits)


def tile_row_choices(dtype: torch.dtype) -> tuple[int, ...]:
    """Row tiles a launch chooses from, ascending; a large float32 tile does not fit in the registers."""
    return (SMALL_TILE_ROWS,) if dtype == torch.float32 else (SMALL_TILE_ROWS, LARGE_TILE_ROWS)


def compile_options(dtype: torch.dtype, tile_rows: int) -> dict[str, int | bool]:
    """Triton's options for the attention kernel, chosen so that no variant spills (see `compile`) or takes more shared
    memory than the smallest GPUs of these series have.

    The block table and the KV it points to are loaded in a chain, so Triton keeps (num_stages - 1) // 2 KV tiles in
    flight.
    """
    if dtype != torch.float32 and tile_rows == SMALL_TILE_ROWS:
        return {"num_warps": 4, "num_stages": 5, "enable_fp_fusion": True}
    return {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}


def head_block_of(head_dim: int) -> int:
    """Columns of a tile: a power of two, and no fewer than the matrix units multiply."""
    block: int = max(16, triton.next_power_of_2(head_dim))
    return block


def dot_precision(dtype: torch.dtype) -> str:
    """How `_dot` multiplies: half precision on the matrix units, float32 there too as a sum of three TF32 products.

    Triton's interpreter multiplies the raw bits of bfloat16, so there the operands are widened first.
    """
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return "widened"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def tree_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: TreeAttentionMeta,
    scale: float,
    *,
    split_positions: int = SPLIT_POSITIONS,
) -> torch.Tensor:
    """Attention of every row over its sequence's committed prefix, its ancestors and itself.

    Same semantics as `treeserve_kernels.tree_attention.tree_attention`; never waits for the device.

    Args:
        q: [T, H, D] queries, rows of the sequences one after the other.
        k_cache: [num_slots, KVH, D] contiguous; H is a multiple of KVH. The rows' own K is already written.
        v_cache: like `k_cache`.
        meta: block tables, lengths and ancestor words, on the device of `q`.
        scale: factor on q . k.
        split_positions: prefix positions per split, a multiple of 64.

    Returns:
        [T, H, D] in q's dtype; sums are float32. If the block tables span more than `split_positions`, a float32
        workspace of num_splits * T * H * (D + 1) is used.

    Raises:
        ValueError: on shapes, dtypes or layouts the kernel does not take.
    """
    _check(q, k_cache, v_cache, split_positions)
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    plan = LaunchPlan.of(q.dtype, num_queries, group, meta, split_positions)
    is_split = plan.num_splits > 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    split_shape = (plan.num_splits, num_queries, num_heads)
    split_out = q.new_empty((*split_shape, head_dim), dtype=torch.float32) if is_split else out
    split_lse = q.new_full(split_shape, -math.inf, dtype=torch.float32)
    head_block = head_block_of(head_dim)
    attention_kernel[(plan.num_tiles, num_kv_heads, plan.num_splits)](
        q.contiguous(), k_cache, v_cache, split_out, split_lse,
        meta.block_tables.contiguous(), meta.context_lens, meta.query_offsets, meta.node_offsets,
        meta.ancestor_words.contiguous(),
        scale * math.log2(math.e), meta.block_tables.shape[0], num_queries * num_heads, num_kv_heads,
        meta.block_tables.shape[1], meta.ancestor_words.shape[1],
        block_size=meta.block_size, group=group, head_dim=head_dim, head_block=head_block,
        tile_rows=plan.tile_rows, split_positions=split_positions, precision=dot_precision(q.dtype),
        **compile_options(q.dtype, plan.tile_rows),
    )  # fmt: skip
    if is_split:
        num_rows = num_queries * num_heads
        merge_kernel[(triton.cdiv(num_rows, MERGE_ROWS),)](
            split_out, split_lse, out, plan.num_splits, num_rows, head_dim, head_block, MERGE_ROWS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, split_positions: int) -> None:
    if k_cache.shape != v_cache.shape or k_cache.shape[2] != q.shape[2] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, K {tuple(k_cache.shape)} and V {tuple(v_cache.shape)} do not fit")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("KV caches must be contiguous")
    if not q.dtype == k_cache.dtype == v_cache.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"one of float32, float16 or bfloat16 throughout, not {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if split_positions < KV_TILE or split_positions % KV_TILE:
        raise ValueError(f"split_positions must be a multiple of {KV_TILE}, not {split_positions}")
