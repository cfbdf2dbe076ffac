"""The runner: reservations around failures, deferred moves, KV sizes, and the exactness measurement."""

import numpy as np
import pytest
import torch

from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.exactness import measure_divergence
from treeserve_engine.model import LlamaModel
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.tree_attention import tree_attention

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model) -> LlamaModel:
    return LlamaModel.load(tiny_model, load_config(tiny_model), torch.float32, CPU)


def _decode(runner, seq_id, tokens, kept=None):
    runner.blocks.reserve(seq_id, len(tokens))
    (logits,) = runner.forward([SequenceRows.from_chain(seq_id, tokens, range(len(tokens)))])
    runner.commit(seq_id, range(len(tokens)) if kept is None else kept)
    return logits


def _runner(model, *seq_ids, num_blocks=6):
    runner = ModelRunner(model, num_blocks, block_size=4)
    for seq_id in seq_ids:
        runner.blocks.add(seq_id)
    return runner


def test_logits_come_back_per_sequence_and_only_where_wanted(model):
    runner = _runner(model, 1, 2, 3)
    for seq_id in (1, 2, 3):
        runner.blocks.reserve(seq_id, 3)
    rows = [SequenceRows.from_chain(s, [5, 6, 7], wanted) for s, wanted in ((2, [2]), (1, []), (3, [2, 0]))]
    two, one, three = runner.forward(rows)
    assert [len(two), len(one), len(three)] == [1, 0, 2]
    assert two.dtype == np.float32 and two.shape[1] == one.shape[1] == model.config.vocab_size
    assert (two[0] == three[0]).all() and (three[0] != three[1]).any()


def test_rollback_leaves_no_trace(model):
    runner, untouched = _runner(model, 1), _runner(model, 1)
    _decode(runner, 1, [5, 6, 7])
    _decode(untouched, 1, [5, 6, 7])
    runner.blocks.reserve(1, 2)
    runner.forward([SequenceRows.from_chain(1, [90, 91], [1])])
    runner.rollback(1)
    assert (_decode(runner, 1, [8]) == _decode(untouched, 1, [8])).all()


def test_a_refused_batch_leaves_the_reservation_for_rollback(model):
    runner = _runner(model, 1)
    runner.blocks.reserve(1, 1)
    with pytest.raises(RuntimeError):
        runner.forward([SequenceRows.from_chain(1, [5, 6], [])])
    runner.rollback(1)
    assert runner.blocks.free_blocks == 6


def test_moves_into_a_block_that_was_given_away_do_no_harm(model):
    runner, plain = _runner(model, 1, num_blocks=2), _runner(model, 2)
    _decode(runner, 1, [5, 6, 7, 8, 9, 10], kept=[0, 3, 5])  # moved when the next pass starts
    runner.blocks.free(1)
    runner.blocks.add(2)
    assert (_decode(runner, 2, [11, 12, 13]) == _decode(plain, 2, [11, 12, 13])).all()
    assert (_decode(runner, 2, [14]) == _decode(plain, 2, [14])).all()


def test_measured_divergence_is_zero_here(model):
    assert measure_divergence(model) == 0.0


def test_divergence_is_seen(tiny_model):
    def fickle(q, k_cache, v_cache, meta, scale):
        return tree_attention(q, k_cache, v_cache, meta, scale) * (1 + 1e-6 * (len(q) > 1))

    model = LlamaModel.load(tiny_model, load_config(tiny_model), torch.float32, CPU, attention=fickle)
    assert 0 < measure_divergence(model) < 1e-2


def test_logits_that_are_no_numbers_are_seen_wherever_they_come(tiny_model):
    def broken_alone(q, k_cache, v_cache, meta, scale):
        return tree_attention(q, k_cache, v_cache, meta, scale) * (float("nan") if len(q) == 8 else 1.0)

    model = LlamaModel.load(tiny_model, load_config(tiny_model), torch.float32, CPU, attention=broken_alone)
    assert np.isnan(measure_divergence(model))
