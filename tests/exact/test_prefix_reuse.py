"""Tokens after a reused prefix have the bits of tokens after a computed one: every engine, dtype and way back.

The reference is plain decoding in a cache of its own: one row per forward pass, nothing shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.int8_decoders import NativeModel, Sizes, random_model
from support.plain_decoding import PlainDecoder, assert_same_bits, prefill, random_tokens, random_tree
from support.tiny_families import write_tiny_family
from support.tiny_model import write_tiny_model

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.interface import Model
from treeserve_engine.kv_storage import TierBytes
from treeserve_engine.loading import load_model
from treeserve_engine.model import LlamaModel
from treeserve_engine.packed_weights import convert, packed_weights
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.library import is_built, isas

BLOCK = 4
PROMPT, REST = 33, 5


def llama(dtype: str) -> Callable[[Path], Model]:
    return lambda folder: load_model(write_tiny_model(folder), dtype=dtype, device="cpu", threads=1)


def family(name: str, dtype: str) -> Callable[[Path], Model]:
    def load(folder: Path) -> Model:
        write_tiny_family(folder, name)
        return load_model(folder, dtype=dtype, device="cpu", threads=1)

    return load


def native(kv_dtype: str, isa: str | None = None, threads: int = 1) -> Callable[[Path], Model]:
    return lambda folder: NativeModel(random_model(Sizes()), kv_dtype, isa=isa, threads=threads, is_poisoned=True)


def twin(folder: Path) -> Model:
    model = write_tiny_model(folder / "model")
    convert(model, folder, lambda _line: None)
    return LlamaModel.from_int8(load_config(model), packed_weights(model, folder, lambda _line: None), torch.bfloat16)


MODELS = {
    "llama-float32": llama("float32"),
    "llama-bfloat16": llama("bfloat16"),
    "int8-twin": twin,
    "gpt2-float32": family("gpt2", "float32"),
    "deepseek_v2-bfloat16": family("deepseek_v2", "bfloat16"),  # keys and values of different widths
}
if is_built():
    MODELS |= {f"native-{dtype}": native(dtype) for dtype in ("float32", "bfloat16", "int8")}
    MODELS |= {f"native-int8-{isa}": native("int8", isa, threads=2) for isa in isas()}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return MODELS[request.param](tmp_path_factory.mktemp("model") / "folder")


class Reuse:
    """A runner in which a prompt was computed once, in chunks and along trees, and then left."""

    def __init__(self, model: Model, tiers: TierBytes | None = None, num_blocks: int = 40) -> None:
        self.model, self.rng = model, random.Random(5)
        self.vocab = model.config.vocab_size
        self.runner = ModelRunner(model, num_blocks, BLOCK, tiers=tiers)
        self.blocks = self.runner.blocks
        self._fragment()
        self.tokens = random_tokens(self.rng, PROMPT, self.vocab)
        self.blocks.add(0, self.tokens)
        prefill(self.runner, 0, self.tokens[:14], 7)
        while (computed := self.blocks.computed_len(0)) < PROMPT - 4:
            self._speculate(computed)
        prefill(self.runner, 0, self.tokens[self.blocks.computed_len(0) :], 5)
        self.blocks.free(0)

    def _fragment(self) -> None:
        """Free blocks lie in no order and hold what others left."""
        others = range(-8, 0)
        for seq_id in others:
            self.blocks.add(seq_id)
            prefill(self.runner, seq_id, random_tokens(self.rng, self.rng.randrange(1, 9), self.vocab), 9)
        for seq_id in self.rng.sample(others, len(others)):
            self.blocks.free(seq_id)

    def _speculate(self, computed: int) -> None:
        """Commit a few tokens out of a tree in which they are not neighbours: their KV moves."""
        right = self.tokens[computed : computed + 3]
        wrong = [(token + 1) % self.vocab for token in right]
        tree = TokenTree((right[0], wrong[1], right[1], wrong[2], right[2]), (-1, 0, 0, 2, 2))
        self.blocks.reserve(0, len(tree))
        self.runner.forward([SequenceRows.from_tree(0, tree)])
        self.runner.commit(0, (0, 2, 4))

    def fill_the_pool(self) -> None:
        """Somebody else needs all of it, and leaves."""
        self.blocks.add(99)
        prefill(self.runner, 99, random_tokens(self.rng, self.blocks.free_blocks * BLOCK, self.vocab), 64)
        self.blocks.free(99)

    def go_on(self, seq_id: int, expected_cached: int) -> None:
        """A tree, a chunk and single tokens after the prompt, compared with plain decoding."""
        rest = random_tokens(self.rng, REST, self.vocab)
        tokens = [*self.tokens, *rest]
        assert self.blocks.add(seq_id, tokens) == expected_cached
        cold = PlainDecoder(self.model, tokens[:expected_cached])
        logits = prefill(self.runner, seq_id, tokens[expected_cached:-1], 6)
        assert_same_bits(logits, [cold.decode(token) for token in tokens[expected_cached:-1]])
        tree = random_tree(self.rng, 7, self.vocab)
        tree = TokenTree((tokens[-1], *tree.token_ids[1:]), tree.parents)
        self.blocks.reserve(seq_id, len(tree))
        (logits,) = self.runner.forward([SequenceRows.from_tree(seq_id, tree)])
        assert_same_bits(logits, cold.tree(tree))
        self.runner.commit(seq_id, (0,))
        self.blocks.check_integrity()


FULL = PROMPT // BLOCK * BLOCK


def test_a_prefix_that_is_still_there(model: Model) -> None:
    reuse = Reuse(model)
    reuse.go_on(1, FULL)
    reuse.go_on(2, FULL)  # beside the first, on the same blocks
    assert reuse.blocks.block_table(1)[: FULL // BLOCK] == reuse.blocks.block_table(2)[: FULL // BLOCK]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prefix_that_comes_back(model: Model, tier: str, tmp_path: Path) -> None:
    tiers = TierBytes(**{tier: 10**7}, disk_folder=tmp_path)
    reuse = Reuse(model, tiers)
    reuse.fill_the_pool()
    assert reuse.blocks.tier_blocks[0] >= FULL // BLOCK
    reuse.go_on(1, FULL)
    assert reuse.blocks.restored_blocks == FULL // BLOCK
    reuse.go_on(2, FULL)


def test_sequences_that_pause_go_on_with_the_same_bits(model: Model) -> None:
    """One is freed in the middle of its step, and its place is used in between."""
    reuse = Reuse(model)
    tokens = random_tokens(reuse.rng, 18, reuse.vocab)
    reuse.blocks.add(1, tokens)
    prefill(reuse.runner, 1, tokens[:-1], 8)
    reuse.blocks.reserve(1, 5)
    reuse.runner.forward([SequenceRows.from_chain(1, tokens[-1:], [0])])
    reuse.blocks.free(1)
    reuse.blocks.add(2)
    prefill(reuse.runner, 2, random_tokens(reuse.rng, 20, reuse.vocab), 8)
    cached = reuse.blocks.add(1, tokens)
    assert cached == 16
    assert_same_bits(prefill(reuse.runner, 1, tokens[cached:], 8)[-1:], [PlainDecoder(model, tokens).logits[-1]])


def test_drafts_are_accepted_alike_after_a_reused_prefix(model: Model) -> None:
    """The tokens that the target chooses along a tree of its own choices, cold and reused."""
    reuse = Reuse(model)
    reuse.blocks.add(1, reuse.tokens)
    chosen = {}
    for seq_id, cached in ((1, FULL), (2, 0)):
        if seq_id == 2:
            reuse.blocks.add(2)
            prefill(reuse.runner, 2, reuse.tokens[:-1], 16)
        assert reuse.blocks.computed_len(seq_id) == (cached or PROMPT - 1)
        chosen[seq_id] = _greedy(reuse.runner, seq_id, reuse.tokens[-1], 8)
    assert chosen[1] == chosen[2] and len(set(chosen[1])) > 1
    chain = TokenTree.chain([reuse.tokens[-1], *chosen[1]])
    for seq_id in (1, 2):
        assert _accepted(reuse.runner, seq_id, chain) == 8


def _greedy(runner: ModelRunner, seq_id: int, token: int, count: int) -> list[int]:
    """What the target says next, without keeping it."""
    output: list[int] = []
    for _ in range(count):
        chain = [token, *output]
        runner.blocks.reserve(seq_id, len(chain))
        (logits,) = runner.forward([SequenceRows.from_chain(seq_id, chain, [len(chain) - 1])])
        runner.rollback(seq_id)
        output.append(int(logits[0].argmax()))
    return output


def _accepted(runner: ModelRunner, seq_id: int, chain: TokenTree) -> int:
    runner.blocks.reserve(seq_id, len(chain))
    (logits,) = runner.forward([SequenceRows.from_tree(seq_id, chain)])
    runner.rollback(seq_id)
    agree = np.argmax(logits[:-1], axis=1) == np.array(chain.token_ids[1:])
    return int(np.cumprod(agree).sum())
