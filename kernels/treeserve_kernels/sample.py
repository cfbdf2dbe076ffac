"""Random paged batches of trees, for tests and benchmarks of the kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treeserve_kernels.tree_attention import TreeAttentionMeta

_WORD_BITS = 64


@dataclass(frozen=True)
class SequenceShape:
    """One sequence of a batch.

    Attributes:
        context_len: committed KV slots.
        parents: each node's parent, `parents[0] == -1`, `parents[i] < i`.
        node_offset: nodes before this one were computed in an earlier pass; the others are this pass's rows.
    """

    context_len: int
    parents: tuple[int, ...]
    node_offset: int = 0

    @property
    def num_positions(self) -> int:
        """KV positions in use: the context and every node."""
        return self.context_len + len(self.parents)


@dataclass(frozen=True)
class HeadShape:
    """Heads of a model: H, KVH and D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of `tree_attention`. Slots that no row may see hold NaN, so that one stray read shows."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: TreeAttentionMeta
    scale: float


def chain(num_nodes: int) -> tuple[int, ...]:
    """Parents of a tree without branches, such as a prefill chunk."""
    return tuple(range(-1, num_nodes - 1))


def star(num_nodes: int) -> tuple[int, ...]:
    """Parents of a root whose children are all the other nodes."""
    return (-1,) + (0,) * (num_nodes - 1)


def random_tree(num_nodes: int, seed: int = 0) -> tuple[int, ...]:
    """Parents of a tree in which every earlier node is as likely a parent as any other."""
    rng = random.Random(seed)
    return (-1, *(rng.randrange(i) for i in range(1, num_nodes)))


def random_inputs(
    sequences: Sequence[SequenceShape],
    heads: HeadShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """Normal q, K and V for the sequences, their blocks scattered over the cache in random order."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-s.num_positions // block_size) for s in sequences]
    num_blocks = sum(needed) + 2  # two blocks belong to nobody
    blocks = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(sequences), max(needed)), -1, dtype=torch.int32)
    used = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    first = 0
    for table, count, sequence in zip(tables, needed, sequences, strict=True):
        own, first = blocks[first : first + count], first + count
        table[:count] = own
        slots = (own.long()[:, None] * block_size + torch.arange(block_size)).flatten()
        used[slots[: sequence.num_positions]] = True
    rows = [len(s.parents) - s.node_offset for s in sequences]
    offsets = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    meta = TreeAttentionMeta(
        block_tables=tables.to(device),
        context_lens=torch.tensor([s.context_len for s in sequences], dtype=torch.int32, device=device),
        query_offsets=offsets.to(device),
        node_offsets=torch.tensor([s.node_offset for s in sequences], dtype=torch.int32, device=device),
        ancestor_words=_ancestor_words(sequences).to(device),
        block_size=block_size,
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def cache() -> torch.Tensor:
        values = normal(len(used), heads.num_kv_heads, heads.head_dim)
        values[~used.to(device)] = torch.nan
        return values

    q = normal(sum(rows), heads.num_heads, heads.head_dim)
    return AttentionInputs(q, cache(), cache(), meta, heads.head_dim**-0.5)


def _ancestor_words(sequences: Sequence[SequenceShape]) -> torch.Tensor:
    """[T, W] int64 words of the sequences' rows: bit j of word w is node 64 w + j."""
    num_words = max(-(-len(s.parents) // _WORD_BITS) for s in sequences)
    words: list[bytes] = []
    for sequence in sequences:
        masks: list[int] = []
        for node, parent in enumerate(sequence.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        words += [mask.to_bytes(num_words * 8, "little") for mask in masks[sequence.node_offset :]]
    return torch.frombuffer(bytearray(b"".join(words)), dtype=torch.int64).reshape(-1, num_words)
