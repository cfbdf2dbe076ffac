"""The native decoder's logits have the same bits alone, in any tree, beside others, on any ISA and number of threads.

The reference is plain decoding, one sequence and one row per forward pass, on the best ISA with one thread.
"""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from support.int8_decoders import NativeModel, Sizes, random_model
from support.plain_decoding import (
    PlainDecoder,
    assert_same_bits,
    fragmented_runner,
    prefill,
    random_tokens,
    random_tree,
)

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.library import is_built, isas

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

# The second is wide enough that three threads share each of its matrices.
SIZES = {
    "odd": Sizes(has_qkv_bias=True),
    "wide": Sizes(
        num_heads=6, num_kv_heads=2, head_dim=64, hidden_size=300, intermediate_size=456, has_qk_norm=True, is_tied=True
    ),
}
VOCAB = Sizes.vocab_size


@dataclass(frozen=True)
class Case:
    """What a test runs on."""

    sizes: str
    isa: str
    threads: int
    kv_dtype: str


CASES = [
    Case("odd", "avx512vnni", 1, "float32"),
    Case("odd", "avx512vnni", 2, "bfloat16"),
    Case("odd", "avx2", 3, "int8"),
    Case("odd", "portable", 2, "float32"),
    Case("wide", "avx512vnni", 2, "int8"),
    Case("wide", "avx2", 1, "bfloat16"),
    Case("wide", "portable", 3, "bfloat16"),
]


@cache
def native(case: Case) -> NativeModel:
    model = random_model(SIZES[case.sizes], seed=3)
    return NativeModel(model, case.kv_dtype, threads=case.threads, isa=case.isa)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c.sizes}-{c.isa}-{c.threads}-{c.kv_dtype}")
def case(request) -> Case:
    if request.param.isa not in isas():
        pytest.skip(f"this CPU has no {request.param.isa}")
    return request.param


@pytest.fixture(scope="module")
def model(case) -> NativeModel:
    return native(case)


@pytest.fixture(scope="module")
def reference(case) -> NativeModel:
    return native(Case(case.sizes, isas()[0], 1, case.kv_dtype))


def prefilled(model: NativeModel, rng: random.Random, prompt: list[int]) -> ModelRunner:
    """A runner on fragmented blocks whose sequence 0 holds a prompt."""
    runner = fragmented_runner(model, rng)
    runner.blocks.add(0)
    prefill(runner, 0, prompt, 64)
    return runner


def tree_logits(runner: ModelRunner, tree: TokenTree) -> np.ndarray:
    """All nodes of a tree of sequence 0 in one pass; keeps nothing."""
    runner.blocks.reserve(0, len(tree))
    (logits,) = runner.forward([SequenceRows.from_tree(0, tree)])
    runner.rollback(0)
    return logits


@pytest.mark.parametrize("chunk", [2, 7, 64, 150])
def test_prefill_chunks(model, reference, chunk):
    tokens = random_tokens(random.Random(chunk), 150, VOCAB)
    runner = ModelRunner(model, num_blocks=20, block_size=16)
    runner.blocks.add(0)
    assert_same_bits(prefill(runner, 0, tokens, chunk), PlainDecoder(reference, tokens).logits)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 21, 34, 64, 150])
def test_trees_of_any_shape_and_order(model, reference, size):
    rng = random.Random(size)
    prompt = random_tokens(rng, rng.randrange(1, 60), VOCAB)
    runner, plain = prefilled(model, rng, prompt), PlainDecoder(reference, prompt)
    tree = random_tree(rng, size, VOCAB)
    assert_same_bits(tree_logits(runner, tree), plain.tree(tree))


@pytest.mark.parametrize("neighbours", [1, 2, 7, 31])
def test_beside_other_sequences(model, reference, neighbours):
    rng = random.Random(neighbours)
    runner = fragmented_runner(model, rng)
    prompts = [random_tokens(rng, rng.choice([1, 4, 17]), VOCAB) for _ in range(neighbours + 1)]
    for seq_id, prompt in enumerate(prompts):
        runner.blocks.add(seq_id)
        prefill(runner, seq_id, prompt, 64)
    trees = [random_tree(rng, rng.choice([1, 2, 9, 20]), VOCAB) for _ in prompts]
    order = rng.sample(range(len(prompts)), len(prompts))
    for seq_id in order:
        runner.blocks.reserve(seq_id, len(trees[seq_id]))
    together = runner.forward([SequenceRows.from_tree(seq_id, trees[seq_id]) for seq_id in order])
    for seq_id, logits in zip(order, together, strict=True):
        assert_same_bits(logits, PlainDecoder(reference, prompts[seq_id]).tree(trees[seq_id]))


def test_logits_of_some_rows(model):
    """Fewer logits than rows, in any order and repeated, are the same as all of them."""
    rng = random.Random(4)
    runner = prefilled(model, rng, random_tokens(rng, 9, VOCAB))
    tree = random_tree(rng, 30, VOCAB)
    everything = tree_logits(runner, tree)
    for wanted in ([29], [3, 0, 17], [5, 5], list(reversed(range(30)))):
        rows = SequenceRows.from_tree(0, tree)
        some = SequenceRows(0, rows.token_ids, rows.depths, rows.ancestor_words, wanted)
        runner.blocks.reserve(0, len(tree))
        assert_same_bits(runner.forward([some])[0], everything[wanted])
        runner.rollback(0)


def test_level_by_level(model, reference):
    rng = random.Random(11)
    prompt = random_tokens(rng, 21, VOCAB)
    tree = TokenTree(tuple(rng.sample(range(VOCAB), 10)), (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
    rows = SequenceRows.from_tree(0, tree)
    runner = prefilled(model, rng, prompt)
    runner.blocks.reserve(0, len(tree))
    levels = []
    for start, stop in ((0, 1), (1, 4), (4, 7), (7, 10)):
        words = rows.ancestor_words[start:stop]
        level = SequenceRows(
            0, tree.token_ids[start:stop], tree.depths[start:stop], words, range(stop - start), node_offset=start
        )
        levels += runner.forward([level])
    assert_same_bits(np.concatenate(levels), PlainDecoder(reference, prompt).tree(tree))


def test_a_run_of_trees_commits_and_chunks_and_its_replay(model, reference):
    """Several sequences step together and commit random paths; everything equals plain decoding, a replay too."""
    rng = random.Random(17)
    runner = fragmented_runner(model, rng)
    committed = {seq_id: [] for seq_id in range(4)}
    plain = {seq_id: PlainDecoder(reference) for seq_id in committed}
    for seq_id in committed:
        runner.blocks.add(seq_id)
    for _ in range(8):
        trees = {}
        for seq_id in rng.sample(sorted(committed), rng.randrange(1, 5)):
            n = rng.choice([1, 4, 12, 30])
            is_chunk = rng.random() < 0.3
            trees[seq_id] = TokenTree.chain(random_tokens(rng, n, VOCAB)) if is_chunk else random_tree(rng, n, VOCAB)
            runner.blocks.reserve(seq_id, n)
        logits = runner.forward([SequenceRows.from_tree(seq_id, tree) for seq_id, tree in trees.items()])
        for (seq_id, tree), actual in zip(trees.items(), logits, strict=True):
            assert_same_bits(actual, plain[seq_id].tree(tree))
            kept = (0, *tree.path(rng.randrange(len(tree))))
            runner.commit(seq_id, kept)  # compaction: the kept nodes' KV moves together
            for node in kept:
                committed[seq_id].append(tree.token_ids[node])
                plain[seq_id].decode(tree.token_ids[node])
        runner.blocks.check_integrity()
    for seq_id, tokens in committed.items():
        expected = plain[seq_id].decode(1)
        replayed = ModelRunner(model, num_blocks=64, block_size=16)
        replayed.blocks.add(0)
        assert_same_bits(prefill(replayed, 0, [*tokens, 1], 64)[-1:], [expected])


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(model, reference, block_size):
    rng = random.Random(block_size)
    prompt = random_tokens(rng, 70, VOCAB)
    runner = ModelRunner(model, num_blocks=-(-200 // block_size), block_size=block_size)
    runner.blocks.add(0)
    prefill(runner, 0, prompt, 33)
    tree = random_tree(rng, 20, VOCAB)
    assert_same_bits(tree_logits(runner, tree), PlainDecoder(reference, prompt).tree(tree))


@pytest.mark.model
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_the_real_model(model_folder, cache_dir, kv_dtype):
    def load(threads: int) -> Model:
        return load_model(
            model_folder, dtype="int8", kv_dtype=kv_dtype, device="cpu", threads=threads, cache_dir=cache_dir
        )

    model, reference, rng = load(2), load(1), random.Random(23)
    vocab = model.config.vocab_size
    prompt, other = (random_tokens(rng, n, vocab) for n in (24, 90))
    tree, neighbour = (random_tree(rng, n, vocab) for n in (20, 64))
    plain = PlainDecoder(reference, prompt)
    runner = ModelRunner(model, num_blocks=64, block_size=16)
    runner.blocks.add(1)
    prefill(runner, 1, other, 64)
    runner.blocks.add(0)
    assert_same_bits(prefill(runner, 0, prompt, 9), plain.logits)
    runner.blocks.reserve(0, len(tree))
    runner.blocks.reserve(1, len(neighbour))
    logits = runner.forward([SequenceRows.from_tree(1, neighbour), SequenceRows.from_tree(0, tree)])
    assert_same_bits(logits[1], plain.tree(tree))
