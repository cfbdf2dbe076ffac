"""The Triton tree attention against its torch twin, in Triton's interpreter on the CPU."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from treeserve_kernels.sample import (
    AttentionInputs,
    HeadShape,
    SequenceShape,
    chain,
    random_inputs,
    random_tree,
    star,
)
from treeserve_kernels.tree_attention import tree_attention

BLOCK = 16
# Both sides sum in float32. Half precision rounds the weights before they meet V, and the result: two roundings of
# 2**-11 (float16) or 2**-8 (bfloat16), relative to weights that sum to one and values of a few units.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
# GQA groups 1, 3, 4 and 8 over head sizes that do and do not fill a power of two.
HEADS = [HeadShape(2, 2, 64), HeadShape(3, 1, 80), HeadShape(4, 1, 96), HeadShape(8, 1, 128)]
TREES = {"root": chain(1), "chain": chain(5), "star": star(9), "random": random_tree(23), "prefill": chain(130)}
CONTEXTS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1)
RAGGED = (
    SequenceShape(0, chain(1)),
    SequenceShape(1, chain(70)),
    SequenceShape(BLOCK - 1, star(4)),
    SequenceShape(BLOCK, random_tree(12, 1), node_offset=5),
    SequenceShape(130, random_tree(19, 2)),
)


@dataclass
class Spy:
    """Stands in for a kernel, launches it and remembers how."""

    kernel: object
    launches: list[tuple[tuple[int, ...], dict[str, object]]] = field(default_factory=list)

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launches.append((grid, kwargs))
            return self.kernel[grid](*args, **kwargs)

        return launch


def _triton(inputs: AttentionInputs, split_positions: int = 1024) -> torch.Tensor:
    from treeserve_kernels.triton.tree_attention import tree_attention_triton

    i = inputs
    return tree_attention_triton(i.q, i.k_cache, i.v_cache, i.meta, i.scale, split_positions=split_positions)


def _assert_matches_twin(inputs: AttentionInputs, split_positions: int = 1024) -> None:
    i = inputs
    # The twin in float32 on the same rounded inputs is the more exact side.
    twin = tree_attention(i.q.float(), i.k_cache.float(), i.v_cache.float(), i.meta, i.scale)
    out = _triton(inputs, split_positions)
    assert out.dtype == i.q.dtype and out.shape == i.q.shape
    torch.testing.assert_close(out.float(), twin, rtol=0, atol=TOLERANCE[i.q.dtype])


def _matches(sequences, heads, dtype, block_size=BLOCK, split_positions=1024):
    inputs = random_inputs(sequences, heads, block_size=block_size, dtype=dtype)
    _assert_matches_twin(inputs, split_positions)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"group{h.num_heads // h.num_kv_heads}-dim{h.head_dim}")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_split_ragged_batch_matches_twin(interpreter, dtype, heads):
    interpreter(_matches, RAGGED, heads, dtype, BLOCK, 64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_unsplit_ragged_batch_matches_twin(interpreter, dtype):
    interpreter(_matches, RAGGED, HEADS[1], dtype)


@pytest.mark.parametrize("context_len", CONTEXTS)
@pytest.mark.parametrize("tree", TREES)
def test_every_tree_at_every_block_edge_matches_twin(interpreter, tree, context_len):
    interpreter(_matches, [SequenceShape(context_len, TREES[tree])], HeadShape(3, 1, 64), torch.float32)


@pytest.mark.parametrize("context_len", [63, 64, 65, 127, 128, 129])
def test_prefix_ending_at_a_split_edge_matches_twin(interpreter, context_len):
    sequences = [SequenceShape(context_len, star(4)), SequenceShape(7, chain(3))]
    interpreter(_matches, sequences, HeadShape(3, 1, 64), torch.float32, BLOCK, 64)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_other_block_sizes_match_twin(interpreter, block_size):
    interpreter(_matches, RAGGED, HeadShape(4, 2, 64), torch.float32, block_size, 64)


def test_more_sequences_than_one_scan_of_the_offsets(interpreter):
    sequences = [SequenceShape(i % 7, chain(1 + i % 3)) for i in range(70)]
    interpreter(_matches, sequences, HeadShape(2, 1, 64), torch.float32)


def _strided_queries():
    inputs = random_inputs(RAGGED, HeadShape(2, 1, 64), block_size=BLOCK, dtype=torch.float32)
    fused = torch.cat([torch.zeros_like(inputs.q), inputs.q], dim=1)
    _assert_matches_twin(replace(inputs, q=fused[:, 2:]))


def test_queries_cut_out_of_a_fused_projection(interpreter):
    interpreter(_strided_queries)


def _launches(sequences, dtype, split_positions):
    """Grids and tile rows of the attention launches, and grids of the merge launches, of one call."""
    from treeserve_kernels.triton import tree_attention as module

    attention, merge = Spy(module.attention_kernel), Spy(module.merge_kernel)
    module.attention_kernel, module.merge_kernel = attention, merge
    try:
        _matches(sequences, HeadShape(4, 1, 64), dtype, BLOCK, split_positions)
    finally:
        module.attention_kernel, module.merge_kernel = attention.kernel, merge.kernel
    return [(grid, kwargs["tile_rows"]) for grid, kwargs in attention.launches], [grid for grid, _ in merge.launches]


def test_short_contexts_take_one_pass_without_a_merge(interpreter):
    attention, merge = interpreter(_launches, [SequenceShape(100, chain(2))], torch.float16, 1024)
    assert attention == [((1, 1, 1), 16)]
    assert merge == []


def test_long_contexts_are_split_and_merged(interpreter):
    # 200 + 2 positions fill 13 blocks of 16 = 208 positions: four splits of 64; 2 rows x 4 heads fit one merge tile.
    attention, merge = interpreter(_launches, [SequenceShape(200, chain(2))], torch.float16, 64)
    assert attention == [((1, 1, 4), 16)]
    assert merge == [(1,)]


def test_prefill_takes_large_tiles_and_decode_small_ones(interpreter):
    prefill, _ = interpreter(_launches, [SequenceShape(0, chain(80))], torch.float16, 1024)
    assert prefill == [((80 * 4 // 64 + 1, 1, 1), 64)]
    decode, _ = interpreter(_launches, [SequenceShape(9, chain(1))] * 5, torch.float16, 1024)
    assert decode == [((5 * 4 // 16 + 5, 1, 1), 16)]


def _beside_a_long_neighbour():
    heads = HeadShape(3, 1, 64)
    mine, neighbour = SequenceShape(50, random_tree(6)), SequenceShape(300, chain(2))
    both = random_inputs([mine, neighbour], heads, block_size=BLOCK, dtype=torch.float32)
    meta = both.meta
    first = replace(
        meta,
        block_tables=meta.block_tables[:1, :4],
        context_lens=meta.context_lens[:1],
        query_offsets=meta.query_offsets[:2],
        node_offsets=meta.node_offsets[:1],
        ancestor_words=meta.ancestor_words[:6],
    )
    alone = _triton(replace(both, q=both.q[:6], meta=first), split_positions=64)
    together = _triton(both, split_positions=64)[:6]
    assert torch.equal(alone, together)


def test_a_split_neighbour_changes_no_bit(interpreter):
    interpreter(_beside_a_long_neighbour)


def _level_by_level():
    heads = HeadShape(3, 1, 64)
    parents = (-1, 0, 0, 1, 1, 2)
    whole = random_inputs([SequenceShape(20, parents)], heads, block_size=BLOCK, dtype=torch.float32)
    expected = _triton(whole)
    for start, stop in ((0, 1), (1, 3), (3, 6)):
        meta = replace(
            whole.meta,
            query_offsets=torch.tensor([0, stop - start], dtype=torch.int32),
            node_offsets=torch.tensor([start], dtype=torch.int32),
            ancestor_words=whole.meta.ancestor_words[start:stop],
        )
        level = _triton(replace(whole, q=whole.q[start:stop], meta=meta))
        torch.testing.assert_close(level, expected[start:stop], rtol=0, atol=1e-6)


def test_level_by_level_equals_the_whole_tree(interpreter):
    interpreter(_level_by_level)


def _refusals():
    inputs = random_inputs([SequenceShape(20, chain(2))], HeadShape(2, 2, 64), block_size=BLOCK, dtype=torch.float32)
    with pytest.raises(ValueError, match="multiple of 64"):
        _triton(inputs, split_positions=100)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        _triton(replace(inputs, q=inputs.q.half()))
    with pytest.raises(ValueError, match="contiguous"):
        _triton(replace(inputs, k_cache=inputs.k_cache.transpose(0, 1).contiguous().transpose(0, 1)))
    with pytest.raises(ValueError, match="do not fit"):
        _triton(replace(inputs, v_cache=inputs.v_cache[:-1]))


def test_inputs_it_does_not_take_are_refused(interpreter):
    interpreter(_refusals)
