"""The native decoder against its plain twin: shapes, options, topologies, block sizes, KV dtypes, ISAs."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from support.int8_decoders import NativeModel, Sizes, batch_arguments, native_shape, native_weights, random_model
from support.int8_twin import Int8Twin, PlainModel
from support.plain_decoding import prefill, random_tokens, random_tree

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows, build_batch
from treeserve_engine.interface import Model
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decoder import Decoder
from treeserve_kernels.cpu.library import is_built, isas
from treeserve_kernels.cpu.packing import pack_linear

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

# Both sides quantise each linear's input. Where the twin's float64 and the decoder's float32 fall on two sides of a
# rounding, one input moves by 1/127 of its group's largest, and whatever sees that row moves a little, too. It is rare:
# with one of a few seeds, most rows agree to float32's precision.
CLOSE, FLIPPED, SHARE_OF_FLIPPED, SEEDS = 1e-5, 5e-2, 0.2, 4

SHAPES = {
    "group1": Sizes(num_heads=3, num_kv_heads=3),
    "group2": Sizes(num_heads=4, num_kv_heads=2, head_dim=32),
    "group3": Sizes(num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=130),
    "group8": Sizes(num_heads=8, num_kv_heads=1, head_dim=8, hidden_size=64),
    "group7-dim80": Sizes(num_heads=7, num_kv_heads=1, head_dim=80, hidden_size=200),
    "dim96": Sizes(num_heads=2, num_kv_heads=1, head_dim=96, hidden_size=65),
    "dim128": Sizes(num_heads=2, num_kv_heads=2, head_dim=128, hidden_size=127),
    "dim6": Sizes(num_heads=5, num_kv_heads=5, head_dim=6, hidden_size=30),
    "tiny": Sizes(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1, intermediate_size=1, vocab_size=32),
    "odd-vocab": Sizes(vocab_size=1001, hidden_size=96),
    "wide": Sizes(hidden_size=320, intermediate_size=900, num_layers=1),
    "one-layer": Sizes(num_layers=1),
    "qkv-bias": Sizes(has_qkv_bias=True),
    "output-bias": Sizes(has_qkv_bias=True, has_output_bias=True),
    "qk-norm": Sizes(has_qk_norm=True),
    "qk-norm-bias": Sizes(has_qk_norm=True, has_qkv_bias=True, head_dim=80, num_heads=3, num_kv_heads=1),
    "tied": Sizes(is_tied=True),
}
VOCAB = 32  # tokens that every shape has


Run = Callable[[Model], list[np.ndarray]]


@cache
def plain_model(shape: str, seed: int) -> PlainModel:
    return random_model(SHAPES[shape], seed)


@cache
def native(shape: str, seed: int = 0, kv_dtype: str = "float32", isa: str | None = None, threads: int = 1) -> Model:
    """A native decoder in whose caches all that no row may see is NaN."""
    return NativeModel(plain_model(shape, seed), kv_dtype, threads=threads, isa=isa, is_poisoned=True)


def errors(actual: list[np.ndarray], expected: list[np.ndarray]) -> np.ndarray:
    """Of each row, relative to its length."""
    a, e = np.concatenate(actual), np.concatenate(expected)
    assert a.dtype == np.float32 and a.shape == e.shape and np.isfinite(e).all()
    return np.linalg.norm(a - e.astype(np.float64), axis=1) / np.linalg.norm(e, axis=1)


def assert_equals_twin(run: Run, shape: str, threads: int = 1) -> None:
    """With float32 KV: to float32's precision, but for flips."""
    flipped = []
    for seed in range(SEEDS):
        found = errors(run(native(shape, seed, threads=threads)), run(Int8Twin(plain_model(shape, seed))))
        assert (found <= FLIPPED).all(), f"rows {np.flatnonzero(~(found <= FLIPPED)).tolist()}: {found}"
        flipped.append((found > CLOSE).mean())
        if flipped[-1] <= SHARE_OF_FLIPPED:
            return
    pytest.fail(f"shares of rows that differ, by seed: {flipped}; the last: {found}")


def assert_near_twin(run: Run, shape: str, kv_dtype: str) -> None:
    """With narrow KV, whose flips all later rows see."""
    found = errors(run(native(shape, 0, kv_dtype)), run(Int8Twin(plain_model(shape, 0), kv_dtype)))
    assert (found <= FLIPPED).all() and np.median(found) <= FLIPPED / 3, found


def mixed_run(model: Model, block_size: int = 4) -> list[np.ndarray]:
    """Logits of all that a service asks: prompts in chunks, trees side by side, commits, a drafter's levels."""
    rng = random.Random(1)
    runner = ModelRunner(model, num_blocks=-(-400 // block_size) + 4, block_size=block_size)
    results = []
    for seq_id, length in enumerate((1, 5, 37)):
        runner.blocks.add(seq_id)
        results.append(prefill(runner, seq_id, random_tokens(rng, length, VOCAB), 15))
    for _ in range(2):
        trees = {seq_id: random_tree(rng, rng.choice([1, 6, 20]), VOCAB) for seq_id in rng.sample(range(3), 3)}
        for seq_id, tree in trees.items():
            runner.blocks.reserve(seq_id, len(tree))
        results += runner.forward([SequenceRows.from_tree(seq_id, tree) for seq_id, tree in trees.items()])
        for seq_id, tree in trees.items():
            runner.commit(seq_id, (0, *tree.path(rng.randrange(len(tree)))))
    return results + levels(runner, 2)


def shuffled_runner(model: Model, rng: random.Random, block_size: int) -> ModelRunner:
    """A runner whose free blocks are in random order."""
    runner = ModelRunner(model, num_blocks=-(-640 // block_size), block_size=block_size)
    seq_ids = range(runner.blocks.total_blocks)
    for seq_id in seq_ids:
        runner.blocks.add(seq_id)
        runner.blocks.reserve(seq_id, 1)
    for seq_id in rng.sample(seq_ids, len(seq_ids)):
        runner.blocks.free(seq_id)
    return runner


def levels(runner: ModelRunner, seq_id: int) -> list[np.ndarray]:
    """A tree of four levels, one pass each; the last asks for two of its rows only."""
    tree = TokenTree(tuple(range(10)), (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
    whole = SequenceRows.from_tree(seq_id, tree)
    runner.blocks.reserve(seq_id, len(tree))
    results = []
    for start, stop, wanted in ((0, 1, [0]), (1, 4, [0, 1, 2]), (4, 7, []), (7, 10, [2, 0])):
        ids, depths, words = tree.token_ids[start:stop], tree.depths[start:stop], whole.ancestor_words[start:stop]
        results += runner.forward([SequenceRows(seq_id, ids, depths, words, wanted, node_offset=start)])
    runner.rollback(seq_id)
    return results


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape):
    assert_equals_twin(mixed_run, shape)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_isa_gives_the_same_bits(shape, isa):
    if isa not in isas():
        pytest.skip(f"this CPU has no {isa}")
    for actual, expected in zip(mixed_run(native(shape, isa=isa)), mixed_run(native(shape)), strict=True):
        np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_block_sizes(block_size):
    assert_equals_twin(partial(mixed_run, block_size=block_size), "group3")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", ["group3", "group7-dim80", "dim6", "dim96", "qk-norm"])
def test_narrow_kv(shape, kv_dtype):
    assert_near_twin(mixed_run, shape, kv_dtype)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_narrow_kv_has_the_same_bits_on_every_isa(kv_dtype, isa):
    if isa not in isas():
        pytest.skip(f"this CPU has no {isa}")
    for shape in ("group7-dim80", "dim6"):
        actual, expected = mixed_run(native(shape, 0, kv_dtype, isa)), mixed_run(native(shape, 0, kv_dtype))
        np.testing.assert_array_equal(np.concatenate(actual), np.concatenate(expected))


TREES = {
    "root": (-1,),
    "chain": tuple(range(-1, 20)),
    "star": (-1, *[0] * 40),
    "binary": (-1, *((i - 1) // 2 for i in range(1, 63))),
    "word-edge": tuple(range(-1, 63)),
    "two-words": (-1, *((i * 7) % i for i in range(1, 65))),
    "three-words": (-1, *(max(0, i - 3) for i in range(1, 140))),
}


@pytest.mark.parametrize("context_len", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("tree", TREES)
def test_trees_at_block_edges(tree, context_len):
    parents = TREES[tree]
    tokens = tuple(random.Random(len(parents)).sample(range(203), len(parents)))

    def run(model: Model) -> list[np.ndarray]:
        rng = random.Random(context_len)
        runner = shuffled_runner(model, rng, 16)
        runner.blocks.add(0)
        if context_len:
            prefill(runner, 0, random_tokens(rng, context_len, VOCAB), 64)
        runner.blocks.reserve(0, len(parents))
        return runner.forward([SequenceRows.from_tree(0, TokenTree(tokens, parents))])

    assert_equals_twin(run, "one-layer", threads=2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_sequences_of_one_row(threads):
    def run(model: Model) -> list[np.ndarray]:
        rng = random.Random(2)
        runner = shuffled_runner(model, rng, 4)
        for seq_id in range(70):
            runner.blocks.add(seq_id)
            prefill(runner, seq_id, random_tokens(rng, 1 + seq_id % 7, VOCAB), 64)
            runner.blocks.reserve(seq_id, 1)
        return runner.forward([SequenceRows.from_chain(i, [i % VOCAB], [0]) for i in range(70)])

    assert_equals_twin(run, "group2", threads)


def test_no_logits_asked_leave_the_same_kv():
    def run(model: Model, wanted: list[int]) -> list[np.ndarray]:
        runner = ModelRunner(model, num_blocks=10, block_size=4)
        runner.blocks.add(0)
        runner.blocks.reserve(0, 9)
        (logits,) = runner.forward([SequenceRows.from_chain(0, range(9), wanted)])
        assert logits.shape == (len(wanted), model.config.vocab_size)
        runner.commit(0, range(9))
        runner.blocks.reserve(0, 1)
        return runner.forward([SequenceRows.from_chain(0, [3], [0])])

    model = native("group2")
    np.testing.assert_array_equal(run(model, []), run(model, list(range(9))))


@pytest.mark.parametrize("outputs", [1, 33, 50])
def test_a_head_over_fewer_tokens_gives_their_logits(outputs):
    plain = plain_model("group2", 0)
    fewer = replace(native_weights(plain), head=pack_linear(np.ascontiguousarray(plain.head.weight[:outputs])))
    decoder = Decoder(native_shape(plain), fewer, threads=1)
    model = native("group2")
    runner = ModelRunner(model, num_blocks=4, block_size=4)
    runner.blocks.add(0)
    runner.blocks.reserve(0, 9)
    last = plain.embedding.shape[0] - 1  # inputs are still of the whole vocabulary
    rows = [SequenceRows.from_chain(0, [*range(8), last], range(9))]
    (expected,) = runner.forward(rows)
    found = decoder.forward(decoder.new_kv(4, 4, "float32"), **batch_arguments(build_batch(rows, runner.blocks)))
    np.testing.assert_array_equal(found, expected[:, :outputs])
