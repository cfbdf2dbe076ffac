"""The torch tree attention against a naive float64 loop over visible positions, and its bits against themselves."""

import random
from dataclasses import replace

import pytest
import torch

from treeserve_kernels.sample import AttentionInputs, HeadShape, SequenceShape, chain, random_inputs, random_tree, star
from treeserve_kernels.tree_attention import TreeAttentionMeta, tree_attention

HEADS = [HeadShape(4, 4, 16), HeadShape(9, 3, 64), HeadShape(6, 1, 80)]
RAGGED = [
    SequenceShape(0, chain(1)),
    SequenceShape(37, random_tree(9)),
    SequenceShape(16, star(5)),
    SequenceShape(3, chain(70)),
    SequenceShape(15, random_tree(90, 1)),
    SequenceShape(64, random_tree(12, 2), node_offset=4),
    SequenceShape(300, chain(2)),
]


def _visible_positions(shape: SequenceShape, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(shape.context_len + node)
        node = shape.parents[node]
    return [*range(shape.context_len), *reversed(path)]


def _naive(inputs: AttentionInputs, sequences: list[SequenceShape], softcap: float | None = None) -> torch.Tensor:
    """Row by row, head by head, over the parents themselves: no words, no masks, no batches."""
    meta, out = inputs.meta, torch.empty_like(inputs.q, dtype=torch.float64)
    group = inputs.q.shape[1] // inputs.k_cache.shape[1]
    row = 0
    for s, shape in enumerate(sequences):
        for node in range(shape.node_offset, len(shape.parents)):
            slots = []
            for position in _visible_positions(shape, node):
                block = int(meta.block_tables[s, position // meta.block_size])
                slots.append(block * meta.block_size + position % meta.block_size)
            for head in range(inputs.q.shape[1]):
                k = inputs.k_cache[slots, head // group].double()
                v = inputs.v_cache[slots, head // group].double()
                scores = k @ inputs.q[row, head].double() * inputs.scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, head] = torch.softmax(scores, 0) @ v
            row += 1
    return out


def _twin(inputs: AttentionInputs) -> torch.Tensor:
    return tree_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.meta, inputs.scale)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_float32_equals_the_naive_loop(heads, block_size):
    inputs = random_inputs(RAGGED, heads, block_size=block_size, dtype=torch.float32)
    out = _twin(inputs)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), _naive(inputs, RAGGED), rtol=0, atol=2e-6)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bfloat16_equals_the_naive_loop_within_its_rounding(heads):
    inputs = random_inputs(RAGGED, heads, block_size=16, dtype=torch.bfloat16)
    out = _twin(inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), _naive(inputs, RAGGED), rtol=0, atol=2e-2)


def test_capped_scores_equal_the_naive_loop():
    inputs = random_inputs(RAGGED, HEADS[1], block_size=16, dtype=torch.float32)
    capped = tree_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.meta, inputs.scale, softcap=0.5)
    expected = _naive(inputs, RAGGED, softcap=0.5)
    torch.testing.assert_close(capped.double(), expected, rtol=0, atol=2e-6)
    assert (expected - _naive(inputs, RAGGED)).abs().max() > 0.01


def test_large_scores_do_not_overflow():
    inputs = random_inputs(RAGGED[:2], HEADS[1], block_size=16, dtype=torch.float32)
    inputs = replace(inputs, q=inputs.q * 100)
    torch.testing.assert_close(_twin(inputs).double(), _naive(inputs, RAGGED[:2]), rtol=0, atol=1e-4)


def test_empty_sequences_are_skipped():
    inputs = random_inputs(RAGGED[:2], HEADS[1], block_size=16, dtype=torch.float32)
    meta = inputs.meta
    padded = TreeAttentionMeta(
        block_tables=meta.block_tables[[0, 0, 1]],
        context_lens=meta.context_lens[[0, 0, 1]],
        query_offsets=meta.query_offsets[[0, 0, 1, 2]],
        node_offsets=meta.node_offsets[[0, 0, 1]],
        ancestor_words=meta.ancestor_words,
        block_size=meta.block_size,
    )
    assert torch.equal(_twin(replace(inputs, meta=padded)), _twin(inputs))


def _only(inputs: AttentionInputs, s: int, rows: slice, node_offset: int) -> AttentionInputs:
    """One sequence's consecutive rows by themselves."""
    meta = inputs.meta
    start = int(meta.query_offsets[s])
    own = slice(start + rows.start, start + rows.stop)
    alone = TreeAttentionMeta(
        block_tables=meta.block_tables[s : s + 1],
        context_lens=meta.context_lens[s : s + 1],
        query_offsets=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
        node_offsets=torch.tensor([node_offset], dtype=torch.int32),
        ancestor_words=meta.ancestor_words[own],
        block_size=meta.block_size,
    )
    return replace(inputs, q=inputs.q[own], meta=alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_row_has_the_bits_it_has_alone(heads, dtype):
    inputs = random_inputs(RAGGED, heads, block_size=16, dtype=dtype)
    together = _twin(inputs)
    row = 0
    for s, shape in enumerate(RAGGED):
        for i in range(len(shape.parents) - shape.node_offset):
            alone = _twin(_only(inputs, s, slice(i, i + 1), shape.node_offset + i))
            assert torch.equal(alone[0], together[row]), f"sequence {s}, row {i}"
            row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_between_the_visible_ones_change_no_bit(dtype):
    """A path in a tree equals the same K and V as committed context: whatever lies between adds nothing."""
    heads, rng = HEADS[1], random.Random(0)
    for context_len, nodes in ((0, 64), (129, 64), (500, 200)):
        shape = SequenceShape(context_len, random_tree(nodes, nodes))
        inputs = random_inputs([shape], heads, block_size=16, dtype=dtype)
        out = _twin(inputs)
        for node in rng.sample(range(nodes), 12):
            positions = torch.tensor(_visible_positions(shape, node))
            slots = inputs.meta.block_tables[0, positions // 16] * 16 + positions % 16
            plain = TreeAttentionMeta(
                block_tables=torch.arange(len(slots), dtype=torch.int32)[None],
                context_lens=torch.tensor([len(slots) - 1], dtype=torch.int32),
                query_offsets=torch.tensor([0, 1], dtype=torch.int32),
                node_offsets=torch.tensor([0], dtype=torch.int32),
                ancestor_words=torch.ones(1, 1, dtype=torch.int64),
                block_size=1,
            )
            args = inputs.q[node : node + 1], inputs.k_cache[slots], inputs.v_cache[slots], plain, inputs.scale
            assert torch.equal(tree_attention(*args)[0], out[node])


def test_sequences_of_like_shape_share_their_calls():
    alike = [SequenceShape(100 + i, chain(1)) for i in range(8)]
    inputs = random_inputs(alike, HEADS[1], block_size=16, dtype=torch.float32)
    assert len(inputs.meta.plan(9, 3).groups) == 1
    unlike = [*alike, SequenceShape(3000, chain(1)), SequenceShape(20, chain(200))]
    inputs = random_inputs(unlike, HEADS[1], block_size=16, dtype=torch.float32)
    assert len(inputs.meta.plan(9, 3).groups) == 3


def test_a_plan_is_made_once_per_pass():
    inputs = random_inputs(RAGGED, HEADS[1], block_size=16, dtype=torch.float32)
    assert inputs.meta.plan(9, 3) is inputs.meta.plan(9, 3)
