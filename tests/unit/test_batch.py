"""Ragged batches: positions, slots, ancestor words, logits ranges."""

from dataclasses import replace

import numpy as np
import pytest

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager

TREE = TokenTree((7, 8, 9, 10, 11), (-1, 0, 0, 1, 3))


def _blocks(*lengths: int, block_size: int = 4) -> BlockManager:
    """Sequences 0, 1, ... with this many committed positions."""
    blocks = BlockManager(200, block_size)
    for seq_id, length in enumerate(lengths):
        blocks.add(seq_id)
        if length:
            blocks.reserve(seq_id, length)
            blocks.commit(seq_id, range(length))
    return blocks


def test_a_tree_and_a_chunk_side_by_side():
    blocks = _blocks(6, 0)
    blocks.reserve(0, 5)
    blocks.reserve(1, 3)
    rows = [SequenceRows.from_tree(0, TREE), SequenceRows.from_chain(1, [1, 2, 3], [2])]
    batch = build_batch(rows, blocks)
    assert batch.input_ids.tolist() == [7, 8, 9, 10, 11, 1, 2, 3]
    assert batch.positions.tolist() == [6, 7, 7, 8, 9, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [*blocks.slots(0, 6, 11), *blocks.slots(1, 0, 3)]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, 7]
    assert batch.logits_offsets == (0, 5, 6)
    assert batch.context_lens.tolist() == [6, 0]
    assert batch.query_offsets.tolist() == [0, 5, 8]
    assert batch.node_offsets.tolist() == [0, 0]
    assert batch.ancestor_words[:, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011, 0b1, 0b11, 0b111]
    assert batch.block_tables.tolist() == [blocks.block_table(0), [*blocks.block_table(1), -1, -1]]
    int32 = {batch.block_tables.dtype, batch.context_lens.dtype, batch.query_offsets.dtype, batch.node_offsets.dtype}
    assert int32 == {np.dtype(np.int32)} and batch.ancestor_words.dtype == np.uint64
    assert batch.block_size == 4


@pytest.mark.parametrize("n", [1, 63, 64, 65, 256])
def test_a_chain_has_the_words_of_a_chain_tree(n):
    rows = SequenceRows.from_chain(0, range(n), [n - 1])
    tree = TokenTree.chain(range(n))
    np.testing.assert_array_equal(rows.ancestor_words, tree.ancestor_words())
    assert rows.ancestor_words.dtype == np.uint64
    assert list(rows.depths) == list(tree.depths)


def test_words_of_unlike_width_are_padded():
    blocks = _blocks(0, 0)
    blocks.reserve(0, 2)
    blocks.reserve(1, 130)
    chains = [SequenceRows.from_chain(0, [1, 2], []), SequenceRows.from_chain(1, range(130), [])]
    words = build_batch(chains, blocks).ancestor_words
    assert words.shape == (132, 3)
    assert words[:2].tolist() == [[1, 0, 0], [3, 0, 0]]
    assert words[131].tolist() == [2**64 - 1, 2**64 - 1, 3]


def test_a_later_level_goes_behind_the_earlier_ones():
    blocks = _blocks(5)
    blocks.reserve(0, 5)
    level = SequenceRows(0, [10], [2], TREE.ancestor_words()[3:4], [0], node_offset=3)
    batch = build_batch([level], blocks)
    assert batch.positions.tolist() == [7]
    assert batch.slot_mapping.tolist() == blocks.slots(0, 8, 9).tolist()
    assert batch.node_offsets.tolist() == [3]


def test_no_logits_wanted():
    blocks = _blocks(0)
    blocks.reserve(0, 2)
    batch = build_batch([SequenceRows.from_chain(0, [1, 2], [])], blocks)
    assert batch.logits_indices.shape == (0,) and batch.logits_indices.dtype == np.int64
    assert batch.logits_offsets == (0, 0)


def test_bad_batches_are_refused():
    blocks = _blocks(0)
    with pytest.raises(ValueError, match="without rows"):
        build_batch([], blocks)
    with pytest.raises(ValueError, match="sequence 0 has no rows"):
        build_batch([SequenceRows.from_chain(0, [], [])], blocks)
    with pytest.raises(RuntimeError, match="are not within its 0"):
        build_batch([SequenceRows.from_chain(0, [1], [])], blocks)
    blocks.reserve(0, 1)
    with pytest.raises(RuntimeError, match="are not within its 1"):
        build_batch([SequenceRows.from_chain(0, [1, 2], [])], blocks)
    with pytest.raises(ValueError, match=r"outside \[0, 1\)"):
        build_batch([SequenceRows.from_chain(0, [1], [1])], blocks)
    with pytest.raises(ValueError, match="2 tokens, 1 depths"):
        build_batch([SequenceRows(0, [1, 2], [0], np.ones((2, 1), np.uint64), [])], blocks)
    one = SequenceRows.from_chain(0, [1], [])
    with pytest.raises(ValueError, match="1 tokens and 2 inputs"):
        build_batch([replace(one, inputs=np.zeros((2, 4), np.float32))], blocks)
    with pytest.raises(ValueError, match=r"outside \[0, 1\)"):
        build_batch([replace(one, feature_rows=[-1])], blocks)


def test_inputs_and_feature_rows_lie_side_by_side():
    blocks = _blocks(3, 0)
    blocks.reserve(0, 2)
    blocks.reserve(1, 1)
    inputs = np.arange(12, dtype=np.float32).reshape(3, 4)
    first = replace(SequenceRows.from_chain(0, [1, 2], []), inputs=inputs[:2], feature_rows=[1, 0])
    second = replace(SequenceRows.from_chain(1, [3], []), inputs=inputs[2:], feature_rows=[0])
    batch = build_batch([first, second], blocks)
    assert batch.inputs is not None and batch.inputs.tolist() == inputs.tolist()
    assert batch.feature_rows.tolist() == [1, 0, 2] and batch.feature_offsets == (0, 2, 3)
    with pytest.raises(ValueError, match="1 of 2 sequences bring inputs"):
        build_batch([first, replace(second, inputs=None)], blocks)
