"""A token's logits have the same bits alone, in any tree, beside other sequences, in a prefill chunk, after compaction.

The reference is always plain decoding: one sequence, one row per forward pass.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
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
from transformers import AutoConfig, AutoModelForCausalLM

from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.loading import load_model
from treeserve_engine.model import LlamaModel, swiglu
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.library import is_built

VOCAB = 203
# Odd widths, so that vector code always has something left over; 256 rows of the wider ones are enough for two threads.
SHAPES = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60, "intermediate_size": 172},
    "one-kv-head": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 72, "intermediate_size": 136},
    "no-groups": {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80, "intermediate_size": 150},
}


@dataclass(frozen=True)
class Case:
    """What a test runs on."""

    shape: str
    dtype: torch.dtype
    threads: int


CASES = [
    Case("grouped", torch.float32, 1),
    Case("grouped", torch.float32, 2),
    Case("grouped", torch.bfloat16, 2),
    Case("one-kv-head", torch.float32, 2),
    Case("no-groups", torch.bfloat16, 1),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name, shape in SHAPES.items():
        config = AutoConfig.for_model(
            "llama",
            vocab_size=VOCAB,
            num_hidden_layers=2,
            head_dim=16,
            max_position_embeddings=1024,
            initializer_range=0.2,
            **shape,
        )
        torch.manual_seed(3)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c.shape}-{str(c.dtype)[6:]}-{c.threads}")
def model(request, folders) -> Iterator[LlamaModel]:
    case: Case = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    folder = folders[case.shape]
    yield LlamaModel.load(folder, load_config(folder), case.dtype, torch.device("cpu"))
    torch.set_num_threads(before)


def test_this_machine_has_tiles_of_many_rows(model):
    assert model.tile_sizes[-1] >= 64, "the tests below would try the slow fallback only"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_on_any_number_of_threads(dtype):
    gate_up = torch.randn(512, 2 * 172).to(dtype)  # divided by 3 or 5 threads, torch would begin amid a row
    alone = torch.cat([swiglu(row.clone()) for row in gate_up.split(1)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(swiglu(gate_up.clone()), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("chunk", [7, 64, 150])
def test_prefill_chunks(model, chunk):
    tokens = random_tokens(random.Random(chunk), 150, VOCAB)
    runner = ModelRunner(model, num_blocks=20, block_size=16)
    runner.blocks.add(0)
    assert_same_bits(prefill(runner, 0, tokens, chunk), PlainDecoder(model, tokens).logits)


@pytest.mark.parametrize("size", [2, 8, 21, 64])
def test_trees_of_any_shape_and_order(model, size):
    rng = random.Random(size)
    prompt = random_tokens(rng, rng.randrange(1, 60), VOCAB)
    plain = PlainDecoder(model, prompt)
    runner = fragmented_runner(model, rng)
    runner.blocks.add(0)
    prefill(runner, 0, prompt, 64)
    for _ in range(2):
        tree = random_tree(rng, size, VOCAB)
        runner.blocks.reserve(0, size)
        (logits,) = runner.forward([SequenceRows.from_tree(0, tree)])
        runner.rollback(0)
        assert_same_bits(logits, plain.tree(tree))


def test_a_tree_of_several_ancestor_words(model):
    rng = random.Random(5)
    plain = PlainDecoder(model, random_tokens(rng, 3, VOCAB))
    runner = fragmented_runner(model, rng)
    runner.blocks.add(0)
    prefill(runner, 0, random_tokens(random.Random(5), 3, VOCAB), 64)
    tree = random_tree(rng, 150, VOCAB)
    runner.blocks.reserve(0, 150)
    assert_same_bits(runner.forward([SequenceRows.from_tree(0, tree)])[0], plain.tree(tree))


@pytest.mark.parametrize("neighbours", [1, 7])
def test_beside_other_sequences(model, neighbours):
    check_beside_others(model, model, neighbours, prompt_lengths=(1, 4, 30, 100), tree_sizes=(1, 2, 9, 40))


def test_level_by_level(model):
    check_level_by_level(model, model)


def test_a_run_of_trees_commits_and_chunks_and_its_replay(model):
    check_a_run_and_its_replay(model, model)


def test_hidden_states(model):
    check_hidden_states(model, model)


def test_inputs_in_place_of_tokens(model):
    check_inputs(model, model._weights.embedding.float().numpy())


def test_thread_counts(model):
    """A replay may run on a machine with another number of threads."""
    tokens = random_tokens(random.Random(2), 300, VOCAB)
    runs, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        runner = ModelRunner(model, num_blocks=20, block_size=16)
        runner.blocks.add(0)
        runs.append(prefill(runner, 0, tokens, 300))
    torch.set_num_threads(before)
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


@pytest.mark.model
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "auto"), ("bfloat16", "auto"), ("int8", "float32"), ("int8", "bfloat16"), ("int8", "int8")],
)
def test_the_real_model(model_folder, cache_dir, dtype, kv_dtype):
    if kv_dtype == "int8" and not is_built():
        pytest.skip("the native decoder is not built")
    model = load_model(model_folder, dtype=dtype, kv_dtype=kv_dtype, device="cpu", threads=2, cache_dir=cache_dir)
    config = model.config
    rng = random.Random(23)
    prompt, other = (random_tokens(rng, n, config.vocab_size) for n in (24, 90))
    tree, neighbour = (random_tree(rng, n, config.vocab_size) for n in (20, 64))
    plain = PlainDecoder(model, prompt)
    runner = ModelRunner(model, num_blocks=64, block_size=16)
    runner.blocks.add(1)
    prefill(runner, 1, other, 64)
    runner.blocks.add(0)
    assert_same_bits(prefill(runner, 0, prompt, 9), plain.logits)
    runner.blocks.reserve(0, len(tree))
    runner.blocks.reserve(1, len(neighbour))
    logits = runner.forward([SequenceRows.from_tree(1, neighbour), SequenceRows.from_tree(0, tree)])
    assert_same_bits(logits[1], plain.tree(tree))
