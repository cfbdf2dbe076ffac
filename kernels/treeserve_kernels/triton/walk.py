"""Walking the token trees of a step along the chosen tokens, as a Triton kernel."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from treeserve_kernels.next_token import SamplingRows

OPTIONS: dict[str, int | bool] = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def walk_kernel(tokens, token_ids, parents, first_rows, out, max_path, nodes_block: tl.constexpr):
    """Walks one sequence's tree: out int32 [S, 2, max_path] gets the chosen tokens and the children they led to.

    A node's children are found by looking at all nodes at once: trees are small, and their order is free.
    """
    sequence = tl.program_id(0)
    first = tl.load(first_rows + sequence)
    num_nodes = tl.load(first_rows + sequence + 1) - first
    nodes = tl.arange(0, nodes_block)
    exists = nodes < num_nodes
    carried = tl.load(token_ids + first + nodes, mask=exists, other=-1)
    parent_rows = tl.load(parents + first + nodes, mask=exists, other=-1)
    row_out = out + sequence.to(tl.int64) * 2 * max_path
    is_column = nodes < max_path
    tl.store(row_out + nodes, tl.full([nodes_block], -1, tl.int32), mask=is_column)
    tl.store(row_out + max_path + nodes, tl.full([nodes_block], -1, tl.int32), mask=is_column)
    tl.debug_barrier()
    node = tl.where(num_nodes > 0, 0, nodes_block)
    step = 0
    while node < nodes_block:
        token = tl.load(tokens + first + node)
        is_child = exists & (parent_rows == first + node) & (carried == token)
        node = tl.min(tl.where(is_child, nodes, nodes_block), 0)
        tl.store(row_out + step, token)
        tl.store(row_out + max_path + step, tl.where(node < nodes_block, node, -1))
        step += 1


def walk_trees_triton(tokens: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Same semantics as `treeserve_kernels.next_token.walk_trees`; never waits for the device."""
    num_sequences = len(rows.first_rows) - 1
    out = tokens.new_empty((num_sequences, 2, rows.max_path))
    if num_sequences:
        nodes_block = triton.next_power_of_2(rows.max_nodes)
        walk_kernel[(num_sequences,)](
            tokens, rows.token_ids, rows.parents, rows.first_rows, out, rows.max_path, nodes_block, **OPTIONS
        )
    return out
