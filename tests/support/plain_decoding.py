"""Plain decoding as a reference, and what is compared with it: random trees, prefill, runners full of leftovers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.runner import ModelRunner


class PlainDecoder:
    """One sequence, one row per forward pass."""

    def __init__(self, model: Model, tokens: Sequence[int] = ()) -> None:
        self._runner = ModelRunner(model, num_blocks=64, block_size=16)
        self._runner.blocks.add(0)
        self.logits = [self.decode(token) for token in tokens]

    def decode(self, token: int) -> np.ndarray:
        self._runner.blocks.reserve(0, 1)
        (logits,) = self._runner.forward([SequenceRows.from_chain(0, [token], [0])])
        self._runner.commit(0, [0])
        return logits[0]

    def tree(self, tree: TokenTree) -> np.ndarray:
        """Logits of every node, each path decoded by itself; keeps nothing."""
        logits: dict[int, np.ndarray] = {}
        for leaf in (i for i in range(len(tree)) if not tree.children[i]):
            path = (0, *tree.path(leaf))
            self._runner.blocks.reserve(0, len(path))
            for depth, node in enumerate(path):
                chain = SequenceRows.from_chain(0, [0] * (depth + 1), [0])
                words = chain.ancestor_words[depth:]
                row = SequenceRows(0, [tree.token_ids[node]], [depth], words, [0], node_offset=depth)
                logits[node] = self._runner.forward([row])[0][0]
            self._runner.rollback(0)
        return np.stack([logits[i] for i in range(len(tree))])


def random_tokens(rng: random.Random, n: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(n)]


def random_tree(rng: random.Random, n: int, vocab: int) -> TokenTree:
    """Any shape, any order in which parents precede their children."""
    reach = rng.choice([1, 3, n])
    parents = [-1, *(rng.randrange(max(0, i - reach), i) for i in range(1, n))]
    tokens = rng.sample(range(vocab), n) if n <= vocab else random_tokens(rng, n, vocab)
    return TokenTree(tuple(tokens), tuple(parents))


def prefill(runner: ModelRunner, seq_id: int, tokens: Sequence[int], chunk: int) -> np.ndarray:
    parts = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        runner.blocks.reserve(seq_id, len(part))
        parts += runner.forward([SequenceRows.from_chain(seq_id, part, range(len(part)))])
        runner.commit(seq_id, range(len(part)))
    return np.concatenate(parts)


def fragmented_runner(model: Model, rng: random.Random, block_size: int = 4) -> ModelRunner:
    """A runner whose free blocks are in random order, and whose free slots hold other sequences' leftovers."""
    runner = ModelRunner(model, num_blocks=400, block_size=block_size)
    for seq_id in range(-60, 0):
        runner.blocks.add(seq_id)
        prefill(runner, seq_id, random_tokens(rng, rng.randrange(1, 20), model.config.vocab_size), 20)
    for seq_id in rng.sample(range(-60, 0), 60):
        runner.blocks.free(seq_id)
    return runner


def bits(logits: np.ndarray | list[np.ndarray]) -> np.ndarray:
    return np.asarray(logits, dtype=np.float32).view(np.uint32)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray | list[np.ndarray]) -> None:
    wrong = np.flatnonzero((bits(actual) != bits(expected)).any(axis=1))
    assert not len(wrong), f"rows {wrong.tolist()} of {len(actual)} differ"
