"""The ragged batch of a forward pass: rows of many sequences side by side, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from treeserve_core.tree import BITS_PER_WORD, TokenTree
from treeserve_engine.block_manager import BlockManager
from treeserve_kernels.tree_attention import TreeAttentionMeta


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's rows of a step: a tree to verify, a prefill chunk, or one level of a drafter's tree.

    Attributes:
        token_ids: one per row.
        depths: position of each row after the committed KV: its depth in the tree.
        ancestor_words: uint64[rows, W], bit j of word w is tree node 64 w + j; the row's own node is included.
        logits_rows: rows whose logits are wanted, in the order in which they are returned.
        node_offset: tree node of the first row; earlier nodes were computed before and have their KV.
    """

    seq_id: int
    token_ids: Sequence[int]
    depths: Sequence[int]
    ancestor_words: npt.NDArray[np.uint64]
    logits_rows: Sequence[int]
    node_offset: int = 0

    @classmethod
    def from_tree(cls, seq_id: int, tree: TokenTree) -> SequenceRows:
        """All nodes of a tree, each with its logits."""
        return cls(seq_id, tree.token_ids, tree.depths, tree.ancestor_words(), range(len(tree)))

    @classmethod
    def from_chain(cls, seq_id: int, token_ids: Sequence[int], logits_rows: Sequence[int]) -> SequenceRows:
        """Consecutive tokens, such as a prefill chunk."""
        n = len(token_ids)
        return cls(seq_id, token_ids, range(n), _chain_words(n), logits_rows)


@dataclass(frozen=True)
class ForwardBatch:
    """What a forward pass reads. T rows, K of them with logits.

    Attributes:
        input_ids: int64[T].
        positions: int64[T], rotary positions.
        slot_mapping: int64[T], where each row's K and V go.
        attention: which KV each row sees.
        logits_indices: int64[K], rows whose logits are wanted.
        logits_offsets: the logits of sequence i are logits[logits_offsets[i]:logits_offsets[i + 1]].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: TreeAttentionMeta
    logits_indices: torch.Tensor
    logits_offsets: tuple[int, ...]


def build_batch(rows: Sequence[SequenceRows], blocks: BlockManager, device: torch.device) -> ForwardBatch:
    """Lay sequences' rows side by side. Their KV positions must be reserved.

    Raises:
        ValueError: if there is no row, or a sequence's parts differ in length.
        RuntimeError: if a row's KV position is not reserved.
    """
    if not rows:
        raise ValueError("a batch without rows")
    for r in rows:
        _check(r)
    counts = [len(r.token_ids) for r in rows]
    contexts = [blocks.computed_len(r.seq_id) for r in rows]
    first_nodes = [context + r.node_offset for context, r in zip(contexts, rows, strict=True)]
    offsets = np.cumsum([0, *counts])
    logits_offsets = np.cumsum([0, *(len(r.logits_rows) for r in rows)])

    def tensor(parts: Sequence[Sequence[int] | npt.NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.int64) for p in parts])).to(device)

    def int32(values: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)

    return ForwardBatch(
        input_ids=tensor([r.token_ids for r in rows]),
        positions=tensor([c + np.asarray(r.depths, dtype=np.int64) for c, r in zip(contexts, rows, strict=True)]),
        slot_mapping=tensor(
            [blocks.slots(r.seq_id, f, f + n) for r, f, n in zip(rows, first_nodes, counts, strict=True)]
        ),
        attention=TreeAttentionMeta(
            block_tables=_block_tables([blocks.block_table(r.seq_id) for r in rows]).to(device),
            context_lens=int32(contexts),
            query_offsets=int32(offsets),
            node_offsets=int32([r.node_offset for r in rows]),
            ancestor_words=_joined_words([r.ancestor_words for r in rows]).to(device),
            block_size=blocks.block_size,
        ),
        logits_indices=tensor(
            [o + np.asarray(r.logits_rows, dtype=np.int64) for o, r in zip(offsets.tolist(), rows, strict=False)]
        ),
        logits_offsets=tuple(logits_offsets.tolist()),
    )


def _check(rows: SequenceRows) -> None:
    n = len(rows.token_ids)
    if n == 0:
        raise ValueError(f"sequence {rows.seq_id} has no rows")
    if len(rows.depths) != n or len(rows.ancestor_words) != n:
        raise ValueError(f"{n} tokens, {len(rows.depths)} depths and {len(rows.ancestor_words)} rows of ancestor words")
    if len(rows.logits_rows) and not (min(rows.logits_rows) >= 0 and max(rows.logits_rows) < n):
        raise ValueError(f"logits of a row outside [0, {n})")


def _chain_words(n: int) -> npt.NDArray[np.uint64]:
    """Lower-triangular ancestor words: row i sees nodes 0 to i."""
    num_words = -(-n // BITS_PER_WORD)
    bits = np.zeros((n, num_words * BITS_PER_WORD), dtype=np.uint8)
    bits[:, :n] = np.tri(n, dtype=np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def _joined_words(words: Sequence[npt.NDArray[np.uint64]]) -> torch.Tensor:
    """int64[T, W], W that of the widest sequence."""
    joined = np.zeros((sum(len(w) for w in words), max(w.shape[1] for w in words)), dtype=np.uint64)
    row = 0
    for w in words:
        joined[row : row + len(w), : w.shape[1]] = w
        row += len(w)
    return torch.from_numpy(joined.view(np.int64))


def _block_tables(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    """int32[S, B], padded with -1."""
    padded = np.full((len(tables), max(len(t) for t in tables)), -1, dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(padded)
