"""The native decoder's logits have the same bits alone, in any tree, beside others, on any ISA and number of threads.

The reference is plain decoding, one sequence and one row per forward pass, on the best ISA with one thread.
"""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from support.int8_decoders import NativeModel, Sizes, random_model
from support.invariance import (
    check_a_run_and_its_replay,
    check_beside_others,
    check_hidden_states,
    check_inputs,
    check_level_by_level,
)
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
    check_beside_others(model, reference, neighbours, prompt_lengths=(1, 4, 17), tree_sizes=(1, 2, 9, 20))


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
    check_level_by_level(model, reference)


def test_a_run_of_trees_commits_and_chunks_and_its_replay(model, reference):
    check_a_run_and_its_replay(model, reference)


def test_hidden_states(model, reference):
    check_hidden_states(model, reference)


def test_inputs_in_place_of_tokens(model, case):
    check_inputs(model, random_model(SIZES[case.sizes], seed=3).embedding)


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
