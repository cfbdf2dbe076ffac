"""Scenarios in which every logit must have the bits of plain decoding, for the suites of all engines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

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
from treeserve_engine.interface import HiddenModel, Model
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decoder import HiddenStates


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


def check_hidden_states(model: HiddenModel, reference: HiddenModel) -> None:
    """Hidden states alone, in a chunk and in a tree beside another sequence; to ask for them moves no logit."""
    rng, vocab, layers = random.Random(19), model.config.vocab_size, model.feature_shape.layers
    prompt, other = random_tokens(rng, 13, vocab), random_tokens(rng, 9, vocab)
    tree = random_tree(rng, 10, vocab)
    runner = fragmented_runner(model, rng)
    for seq_id, tokens in enumerate((other, prompt)):
        runner.blocks.add(seq_id)
        runner.blocks.reserve(seq_id, len(tokens))
    wanted, of_features = [12, 3, 3], [0, 12, 7]
    chunks = [
        replace(SequenceRows.from_chain(0, other, []), feature_rows=[8]),
        replace(SequenceRows.from_chain(1, prompt, wanted), feature_rows=of_features),
    ]
    expected = _hidden_alone(reference, prompt)
    of_other, of_prompt = runner.forward_hidden(chunks, layers)
    assert of_other.logits.shape == (0, vocab) and of_other.last.shape == (0, model.feature_shape.hidden_size)
    assert_same_bits(of_other.features[:, 0], _hidden_alone(reference, other).features[8:, 0])
    assert_same_bits(of_prompt.logits, expected.logits[wanted])
    assert_same_bits(of_prompt.last, expected.last[wanted])
    for depth in range(len(layers)):
        assert_same_bits(of_prompt.features[:, depth], expected.features[of_features, depth])
    assert_same_bits(
        np.concatenate(runner.forward([replace(chunk, feature_rows=()) for chunk in chunks])), of_prompt.logits
    )
    for seq_id, tokens in enumerate((other, prompt)):
        runner.commit(seq_id, range(len(tokens)))
        runner.blocks.reserve(seq_id, len(tree))
    rows = [replace(SequenceRows.from_tree(s, tree), feature_rows=range(len(tree))) for s in (0, 1)]
    states = runner.forward_hidden(rows, layers)[1]
    for node in (0, len(tree) // 2, len(tree) - 1):
        path = [*prompt, tree.token_ids[0], *(tree.token_ids[n] for n in tree.path(node))]
        alone = _hidden_alone(reference, path)
        assert_same_bits(states.logits[node : node + 1], alone.logits[-1:])
        assert_same_bits(states.last[node : node + 1], alone.last[-1:])
        assert_same_bits(states.features[node], alone.features[-1])


def check_inputs(model: HiddenModel, embedding: np.ndarray) -> None:
    """What enters the first layer may be brought instead of tokens: with their embeddings nothing changes.

    Args:
        embedding: float32[vocab, H], the model's own.
    """
    rng, vocab = random.Random(29), model.config.vocab_size
    tokens, tree = random_tokens(rng, 17, vocab), random_tree(rng, 9, vocab)
    runner = fragmented_runner(model, rng)
    states = []
    for seq_id in (0, 1):
        runner.blocks.add(seq_id)
        for rows, kept in (
            (SequenceRows.from_chain(seq_id, tokens, [16]), range(17)),
            (SequenceRows.from_tree(seq_id, tree), ()),
        ):
            runner.blocks.reserve(seq_id, len(rows.token_ids))
            if seq_id == 1:
                ids = np.array(rows.token_ids)
                rows = replace(rows, token_ids=[0] * len(ids), inputs=np.ascontiguousarray(embedding[ids], np.float32))
            states += runner.forward_hidden([rows])
            runner.commit(seq_id, kept)
    for of_tokens, of_inputs in zip(states[:2], states[2:], strict=True):
        assert_same_bits(of_inputs.logits, of_tokens.logits)
        assert_same_bits(of_inputs.last, of_tokens.last)


def _hidden_alone(model: HiddenModel, tokens: Sequence[int]) -> HiddenStates:
    """One row per forward pass."""
    runner = ModelRunner(model, num_blocks=16, block_size=16)
    runner.blocks.add(0)
    states = []
    for token in tokens:
        runner.blocks.reserve(0, 1)
        row = replace(SequenceRows.from_chain(0, [token], [0]), feature_rows=[0])
        states += runner.forward_hidden([row], model.feature_shape.layers)
        runner.commit(0, [0])
    return HiddenStates(*(np.concatenate([vars(s)[name] for s in states]) for name in ("logits", "last", "features")))
