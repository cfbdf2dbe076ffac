"""Tree attention over paged KV in plain torch: the meaning of the kernels, and the exact mode on CPUs.

A row's output has the same bits whatever else is computed with it: alone, in any tree, beside any sequences, in a
prefill chunk. Invisible positions only ever add exact zeros, and every reduction is indifferent to them:

- scores: each is a dot product over head_dim; the matmul's row count is padded to a multiple of `_ROW_TILE`, where
  BLAS sums every row alike (`tests/kernels` and `tests/exact` hold it to that);
- the largest score is exact;
- weights are rounded to multiples of 2^-40, so that their float64 sum is exact in any order;
- weights times V goes through `embedding_bag`, which sums each row's positions one after the other, in order. Nodes
  follow their ancestors, so the visible positions come in the same order as in a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

_ROW_TILE = 4
_KEY_TILE = 32
_WEIGHT_SCALE = 2.0**40  # weights lie in [0, 1]: 2^13 of them sum to at most 2^53 without rounding
# Padded scores that cost about as much as the torch calls of one more group.
_GROUP_OVERHEAD = 1500


@dataclass(frozen=True)
class TreeAttentionMeta:
    """Where each row's visible KV lies. S sequences, T rows, B blocks of the longest table, W words.

    KV position p of sequence s is slot block_tables[s, p // block_size] * block_size + p % block_size, and tree node
    j lives at KV position context_lens[s] + j. A row sees KV positions [0, context_lens[s]) and every node whose bit
    is set. A prefill chunk is a chain.

    Attributes:
        block_tables: int32[S, B], padded with -1.
        context_lens: int32[S], committed KV positions.
        query_offsets: int32[S + 1]; the rows of sequence s are query_offsets[s]:query_offsets[s + 1].
        node_offsets: int32[S], tree node of the sequence's first row: 0 except when drafting level by level.
        ancestor_words: int64[T, W]; bit j of word w is node 64 w + j, the row's own included.
    """

    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_offsets: torch.Tensor
    node_offsets: torch.Tensor
    ancestor_words: torch.Tensor
    block_size: int
    _plans: dict[tuple[int, int], _Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plan(self, num_heads: int, num_kv_heads: int) -> _Plan:
        """The indices and masks of a pass: made by its first layer, used by all."""
        key = (num_heads, num_kv_heads)
        if key not in self._plans:
            self._plans[key] = _make_plan(self, num_heads, num_kv_heads)
        return self._plans[key]


@dataclass(frozen=True)
class _Group:
    """Sequences of similar shape, padded to N score rows and L positions each. S sequences, M = S * KVH.

    A score row is a (query row, head of the KV head's group) pair.
    """

    query_index: torch.Tensor  # int64[M * N]: rows of q as [T * H, D]
    key_index: torch.Tensor  # int64[M * L]: rows of a cache as [num_slots * KVH, D]
    mask: torch.Tensor  # float32[S, 1, N, L]: 0 or -inf
    bag_index: torch.Tensor  # int32[M * N * L]: key_index once more for every score row
    bag_offsets: torch.Tensor  # int32[M * N]: where each score row's positions begin in bag_index


@dataclass(frozen=True)
class _Plan:
    groups: tuple[_Group, ...]
    output_index: torch.Tensor  # int64[T * H]: where each output row is among the score rows of all groups


@dataclass(frozen=True)
class _Rows:
    """One sequence's part of a batch, on the host."""

    first_row: int
    slots: npt.NDArray[np.int64]  # of its KV positions: the context, then every node computed so far
    visible: npt.NDArray[np.bool_]  # [rows, nodes]

    @property
    def context_len(self) -> int:
        return len(self.slots) - int(self.visible.shape[1])


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: TreeAttentionMeta,
    scale: float,
    *,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend from every row to its visible KV; see the module for what is exact.

    Scores and sums are float32. With bfloat16 caches, weights and output are rounded to bfloat16 on the way.

    Args:
        q: [T, H, D].
        k_cache: [num_slots, KVH, D], H a multiple of KVH.
        v_cache: like k_cache.
        meta: the visible KV of each row; the rows' own K and V are in the caches already.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).

    Returns:
        [T, H, D], q's dtype.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    plan = meta.plan(num_heads, num_kv_heads)
    queries = q.reshape(num_rows * num_heads, head_dim)
    keys, values = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
    outputs = [_attend(group, queries, keys, values, scale, softcap) for group in plan.groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.index_select(0, plan.output_index).view(q.shape).to(q.dtype)


def _attend(
    group: _Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    num_sequences, _, num_rows, num_positions = group.mask.shape
    head_dim = q.shape[1]
    queries = q.index_select(0, group.query_index).float().mul_(scale).view(-1, num_rows, head_dim)
    k = keys.index_select(0, group.key_index).float().view(-1, num_positions, head_dim)
    weights = torch.bmm(queries, k.transpose(1, 2))
    if softcap is not None:
        weights.div_(softcap).tanh_().mul_(softcap)
    weights.view(num_sequences, -1, num_rows, num_positions).add_(group.mask)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_().mul_(_WEIGHT_SCALE).round_()
    weights = weights.to(values.dtype)
    totals = weights.sum(-1, dtype=torch.float64).float().view(-1, 1)
    sums = functional.embedding_bag(
        group.bag_index, values, group.bag_offsets, mode="sum", per_sample_weights=weights.view(-1)
    )
    return sums / totals


def _make_plan(meta: TreeAttentionMeta, num_heads: int, num_kv_heads: int) -> _Plan:
    sequences = _sequences_of(meta)
    device = meta.context_lens.device
    output_index = np.empty((sum(len(s.visible) for s in sequences), num_heads), dtype=np.int64)
    groups: list[_Group] = []
    first_output = 0
    for members in _grouped(sequences, num_heads // num_kv_heads):
        group = _make_group(members, num_heads, num_kv_heads, device)
        _index_outputs(output_index, members, first_output, num_kv_heads, group.mask.shape[2])
        first_output += len(group.query_index)
        groups.append(group)
    return _Plan(tuple(groups), torch.from_numpy(output_index.reshape(-1)).to(device))


def _sequences_of(meta: TreeAttentionMeta) -> list[_Rows]:
    tables = meta.block_tables.cpu().numpy().astype(np.int64)
    words = np.ascontiguousarray(meta.ancestor_words.cpu().numpy().astype("<i8", copy=False))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    context_lens, node_offsets = meta.context_lens.tolist(), meta.node_offsets.tolist()
    sequences: list[_Rows] = []
    for s, (first, last) in enumerate(pairwise(meta.query_offsets.tolist())):
        if first == last:
            continue
        nodes = node_offsets[s] + last - first
        positions = np.arange(context_lens[s] + nodes)
        slots = tables[s, positions // meta.block_size] * meta.block_size + positions % meta.block_size
        sequences.append(_Rows(first, slots, bits[first:last, :nodes]))
    return sequences


def _padded(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _grouped(sequences: list[_Rows], heads_per_kv: int) -> list[list[_Rows]]:
    """Put sequences of similar shape together while what padding adds costs less than another group."""

    def shape(sequence: _Rows) -> tuple[int, int]:
        return _padded(len(sequence.visible) * heads_per_kv, _ROW_TILE), _padded(len(sequence.slots), _KEY_TILE)

    groups: list[list[_Rows]] = []
    rows = positions = 0
    for sequence in sorted(sequences, key=shape):
        own_rows, own_positions = shape(sequence)
        new_rows, new_positions = max(rows, own_rows), max(positions, own_positions)
        if groups:
            apart = len(groups[-1]) * rows * positions + own_rows * own_positions
            together = (len(groups[-1]) + 1) * new_rows * new_positions
            if together - apart <= _GROUP_OVERHEAD:
                groups[-1].append(sequence)
                rows, positions = new_rows, new_positions
                continue
        groups.append([sequence])
        rows, positions = own_rows, own_positions
    return groups


def _make_group(members: list[_Rows], num_heads: int, num_kv_heads: int, device: torch.device) -> _Group:
    heads_per_kv = num_heads // num_kv_heads
    num_rows = _padded(max(len(m.visible) for m in members) * heads_per_kv, _ROW_TILE)
    num_positions = _padded(max(len(m.slots) for m in members), _KEY_TILE)
    kv_heads = np.arange(num_kv_heads)[:, None]
    queries = np.zeros((len(members), num_kv_heads, num_rows), dtype=np.int64)
    keys = np.empty((len(members), num_kv_heads, num_positions), dtype=np.int64)
    mask = np.full((len(members), 1, num_rows, num_positions), -np.inf, dtype=np.float32)
    for i, member in enumerate(members):
        rows = np.arange(len(member.visible) * heads_per_kv)
        row, head = member.first_row + rows // heads_per_kv, rows % heads_per_kv
        queries[i, :, : len(rows)] = row * num_heads + kv_heads * heads_per_kv + head
        keys[i] = member.slots[0] * num_kv_heads + kv_heads  # padding: any slot that holds numbers
        keys[i, :, : len(member.slots)] = member.slots * num_kv_heads + kv_heads
        mask[i, 0, : len(rows), : member.context_len] = 0.0
        nodes = mask[i, 0, : len(rows), member.context_len : len(member.slots)]
        nodes[np.repeat(member.visible, heads_per_kv, axis=0)] = 0.0
        mask[i, 0, len(rows) :, 0] = 0.0  # padding rows see something, so that they hold no NaN
    batch = len(members) * num_kv_heads
    bags = np.repeat(keys.astype(np.int32).reshape(batch, 1, num_positions), num_rows, axis=1)
    return _Group(
        query_index=torch.from_numpy(queries.reshape(-1)).to(device),
        key_index=torch.from_numpy(keys.reshape(-1)).to(device),
        mask=torch.from_numpy(mask).to(device),
        bag_index=torch.from_numpy(bags.reshape(-1)).to(device),
        bag_offsets=(torch.arange(batch * num_rows, dtype=torch.int32) * num_positions).to(device),
    )


def _index_outputs(
    output_index: npt.NDArray[np.int64], members: list[_Rows], first_output: int, num_kv_heads: int, num_rows: int
) -> None:
    """Write where a group's members find their outputs: score rows are ordered (sequence, KV head, row, head)."""
    heads_per_kv = output_index.shape[1] // num_kv_heads
    heads = np.arange(output_index.shape[1])
    for i, member in enumerate(members):
        row = np.arange(len(member.visible))[:, None]
        batch = i * num_kv_heads + heads // heads_per_kv
        own = output_index[member.first_row : member.first_row + len(row)]
        own[:] = first_output + batch * num_rows + row * heads_per_kv + heads % heads_per_kv
