"""Scenarios in which every logit must have the bits of plain decoding, for the suites of all engines."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

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
from treeserve_engine.runner import ModelRunner


def check_beside_others(
    model: Model, reference: Model, neighbours: int, prompt_lengths: Sequence[int], tree_sizes: Sequence[int]
) -> None:
    """Trees of many sequences in one pass, in random order."""
    rng, vocab = random.Random(neighbours), model.config.vocab_size
    runner = fragmented_runner(model, rng)
    prompts = [random_tokens(rng, rng.choice(prompt_lengths), vocab) for _ in range(neighbours + 1)]
    for seq_id, prompt in enumerate(prompts):
        runner.blocks.add(seq_id)
        prefill(runner, seq_id, prompt, 64)
    trees = [random_tree(rng, rng.choice(tree_sizes), vocab) for _ in prompts]
    order = rng.sample(range(len(prompts)), len(prompts))
    for seq_id in order:
        runner.blocks.reserve(seq_id, len(trees[seq_id]))
    together = runner.forward([SequenceRows.from_tree(seq_id, trees[seq_id]) for seq_id in order])
    for seq_id, logits in zip(order, together, strict=True):
        assert_same_bits(logits, PlainDecoder(reference, prompts[seq_id]).tree(trees[seq_id]))


def check_level_by_level(model: Model, reference: Model) -> None:
    """A tree computed as a drafter does: one pass for each level."""
    rng, vocab = random.Random(11), model.config.vocab_size
    prompt = random_tokens(rng, 21, vocab)
    tree = TokenTree(tuple(rng.sample(range(vocab), 10)), (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
    rows = SequenceRows.from_tree(0, tree)
    runner = fragmented_runner(model, rng)
    runner.blocks.add(0)
    prefill(runner, 0, prompt, 64)
    runner.blocks.reserve(0, len(tree))
    levels = []
    for start, stop in ((0, 1), (1, 4), (4, 7), (7, 10)):
        words = rows.ancestor_words[start:stop]
        level = SequenceRows(
            0, tree.token_ids[start:stop], tree.depths[start:stop], words, range(stop - start), node_offset=start
        )
        levels += runner.forward([level])
    assert_same_bits(np.concatenate(levels), PlainDecoder(reference, prompt).tree(tree))


def check_a_run_and_its_replay(model: Model, reference: Model) -> None:
    """Several sequences step together and commit random paths; everything equals plain decoding, a replay too."""
    rng, vocab = random.Random(17), model.config.vocab_size
    runner = fragmented_runner(model, rng)
    committed: dict[int, list[int]] = {seq_id: [] for seq_id in range(4)}
    plain = {seq_id: PlainDecoder(reference) for seq_id in committed}
    for seq_id in committed:
        runner.blocks.add(seq_id)
    for _ in range(8):
        trees = {}
        for seq_id in rng.sample(sorted(committed), rng.randrange(1, 5)):
            n = rng.choice([1, 4, 12, 30])
            is_chunk = rng.random() < 0.3
            trees[seq_id] = TokenTree.chain(random_tokens(rng, n, vocab)) if is_chunk else random_tree(rng, n, vocab)
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
