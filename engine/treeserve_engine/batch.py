"""The ragged batch of a forward pass: rows of many sequences side by side, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from treeserve_core.tree import BITS_PER_WORD, TokenTree
from treeserve_engine.block_manager import BlockManager

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's rows of a step: a tree to verify, a prefill chunk, or one level of a drafter's tree.

    Attributes:
        token_ids: one per row.
        depths: position of each row after the committed KV: its depth in the tree.
        ancestor_words: uint64[rows, W], bit j of word w is tree node 64 w + j; the row's own node is included.
        logits_rows: rows whose logits are wanted, in the order in which they are returned.
        node_offset: tree node of the first row; earlier nodes were computed before and have their KV.
        inputs: float32[rows, H], what enters the first layer in place of the tokens' embeddings.
        feature_rows: rows whose hidden states are wanted (`HiddenModel`).
    """

    seq_id: int
    token_ids: Sequence[int]
    depths: Sequence[int]
    ancestor_words: npt.NDArray[np.uint64]
    logits_rows: Sequence[int]
    node_offset: int = 0
    inputs: Float32Array | None = None
    feature_rows: Sequence[int] = ()

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
    """What a forward pass reads. S sequences, T rows, K of them with logits, B blocks of the longest table, W words.

    KV position p of sequence s is slot block_tables[s, p // block_size] * block_size + p % block_size, and tree node
    j lives at KV position context_lens[s] + j. A row sees KV positions [0, context_lens[s]) and every node whose bit
    is set. A prefill chunk is a chain.

    Attributes:
        input_ids: int64[T].
        positions: int64[T], rotary positions.
        slot_mapping: int64[T], where each row's K and V go.
        block_tables: int32[S, B], padded with -1.
        context_lens: int32[S], committed KV positions.
        query_offsets: int32[S + 1]; the rows of sequence s are query_offsets[s]:query_offsets[s + 1].
        node_offsets: int32[S], tree node of the sequence's first row: 0 except when drafting level by level.
        ancestor_words: uint64[T, W]; bit j of word w is node 64 w + j, the row's own included.
        logits_indices: int64[K], rows whose logits are wanted.
        logits_offsets: the logits of sequence i are logits[logits_offsets[i]:logits_offsets[i + 1]].
        inputs: float32[T, H] or None: what enters the first layer in place of the tokens' embeddings.
        feature_rows: int64[F], rows whose hidden states are wanted.
        feature_offsets: like logits_offsets.
    """

    input_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int64Array
    block_tables: Int32Array
    context_lens: Int32Array
    query_offsets: Int32Array
    node_offsets: Int32Array
    ancestor_words: npt.NDArray[np.uint64]
    block_size: int
    logits_indices: Int64Array
    logits_offsets: tuple[int, ...]
    inputs: Float32Array | None = None
    feature_rows: Int64Array = field(default_factory=lambda: _NONE)
    feature_offsets: tuple[int, ...] = ()


def build_batch(rows: Sequence[SequenceRows], blocks: BlockManager) -> ForwardBatch:
    """Lay sequences' rows side by side. Their KV positions must be reserved.

    Raises:
        ValueError: if there is no row, a sequence's parts differ in length, or some sequences bring inputs and some do
            not.
        RuntimeError: if a row's KV position is not reserved.
    """
    if not rows:
        raise ValueError("a batch without rows")
    for r in rows:
        _check(r)
    counts = [len(r.token_ids) for r in rows]
    contexts = [blocks.computed_len(r.seq_id) for r in rows]
    offsets = list(accumulate(counts, initial=0))
    slots = [
        blocks.slots(r.seq_id, context + r.node_offset, context + r.node_offset + n)
        for r, context, n in zip(rows, contexts, counts, strict=True)
    ]
    of_sequences = np.array([contexts, [r.node_offset for r in rows]], dtype=np.int32)
    return ForwardBatch(
        input_ids=_joined([r.token_ids for r in rows]),
        positions=_joined([[context + d for d in r.depths] for r, context in zip(rows, contexts, strict=True)]),
        slot_mapping=_joined(slots),
        block_tables=_block_tables([blocks.block_table(r.seq_id) for r in rows]),
        context_lens=of_sequences[0],
        query_offsets=np.array(offsets, dtype=np.int32),
        node_offsets=of_sequences[1],
        ancestor_words=_joined_words([r.ancestor_words for r in rows]),
        block_size=blocks.block_size,
        logits_indices=_indices([r.logits_rows for r in rows], offsets),
        logits_offsets=tuple(accumulate((len(r.logits_rows) for r in rows), initial=0)),
        inputs=_joined_inputs(rows),
        feature_rows=_indices([r.feature_rows for r in rows], offsets),
        feature_offsets=tuple(accumulate((len(r.feature_rows) for r in rows), initial=0)),
    )


def _check(rows: SequenceRows) -> None:
    n = len(rows.token_ids)
    if n == 0:
        raise ValueError(f"sequence {rows.seq_id} has no rows")
    if len(rows.depths) != n or len(rows.ancestor_words) != n:
        raise ValueError(f"{n} tokens, {len(rows.depths)} depths and {len(rows.ancestor_words)} rows of ancestor words")
    if rows.inputs is not None and len(rows.inputs) != n:
        raise ValueError(f"{n} tokens and {len(rows.inputs)} inputs")
    for wanted in (rows.logits_rows, rows.feature_rows):
        if len(wanted) and not (min(wanted) >= 0 and max(wanted) < n):
            raise ValueError(f"logits or features of a row outside [0, {n})")


def _chain_words(n: int) -> npt.NDArray[np.uint64]:
    """Lower-triangular ancestor words: row i sees nodes 0 to i."""
    num_words = -(-n // BITS_PER_WORD)
    bits = np.zeros((n, num_words * BITS_PER_WORD), dtype=np.uint8)
    bits[:, :n] = np.tri(n, dtype=np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def _joined(parts: Sequence[Sequence[int] | Int64Array]) -> Int64Array:
    arrays = [np.asarray(part, dtype=np.int64) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _indices(wanted: Sequence[Sequence[int]], offsets: Sequence[int]) -> Int64Array:
    """Wanted rows of each sequence as rows of the batch."""
    indices = [first + i for first, own in zip(offsets, wanted, strict=False) for i in own]
    return np.array(indices, dtype=np.int64) if indices else _NONE


def _joined_inputs(rows: Sequence[SequenceRows]) -> Float32Array | None:
    parts = [r.inputs for r in rows if r.inputs is not None]
    if not parts:
        return None
    if len(parts) != len(rows):
        raise ValueError(f"{len(parts)} of {len(rows)} sequences bring inputs")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _joined_words(words: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """uint64[T, W], W that of the widest sequence."""
    if len(words) == 1:
        return words[0]
    joined = np.zeros((sum(len(w) for w in words), max(w.shape[1] for w in words)), dtype=np.uint64)
    row = 0
    for w in words:
        joined[row : row + len(w), : w.shape[1]] = w
        row += len(w)
    return joined


def _block_tables(tables: Sequence[Sequence[int]]) -> Int32Array:
    """int32[S, B], padded with -1."""
    longest = max(map(len, tables))
    return np.array([[*table, *[-1] * (longest - len(table))] for table in tables], dtype=np.int32)
