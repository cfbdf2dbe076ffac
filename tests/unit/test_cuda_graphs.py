"""Graph buckets with a fake recorder on the CPU: which graph runs, and that padding changes no bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tree_shapes import SHAPES

from treeserve_core.tree import TokenTree
from treeserve_engine import cuda_graphs
from treeserve_engine.batch import SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.config import load_config
from treeserve_engine.cuda_graphs import Bucket, GraphedForward, padded
from treeserve_engine.cuda_model import CudaLlamaModel
from treeserve_engine.interface import DeviceModel
from treeserve_engine.model import LlamaModel
from treeserve_engine.runner import ModelRunner
from treeserve_engine.torch_batch import TorchBatch
from treeserve_kernels.tree_attention import TreeAttentionMeta, tree_attention

CPU = torch.device("cpu")


class FakeBackend:
    """Replays by running again, into the same tensor: as a graph does, on the tensors it was recorded with."""

    recorded: int = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        self.recorded += 1
        output = run().clone()
        return lambda: output.copy_(run()), output


def ragged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: TreeAttentionMeta, scale: float
) -> torch.Tensor:
    """The twin as the kernel behaves: it plans anew each time, and leaves rows of no sequence as garbage."""
    rows = int(meta.query_offsets[-1])
    own = replace(meta, ancestor_words=meta.ancestor_words[:rows])
    return torch.cat((tree_attention(q[:rows], k, v, own, scale), torch.full_like(q[rows:], torch.nan)))


class FakeCudaLlama(CudaLlamaModel):
    graph_backend = FakeBackend


def batch_of(*trees: TokenTree, contexts: int = 3):
    blocks = BlockManager(128, 4)
    for seq_id, tree in enumerate(trees):
        blocks.add(seq_id)
        if contexts:
            blocks.reserve(seq_id, contexts)
            blocks.commit(seq_id, range(contexts))
        blocks.reserve(seq_id, len(tree))
    return build_batch([SequenceRows.from_tree(i, tree) for i, tree in enumerate(trees)], blocks)


def test_buckets_are_powers_of_two():
    batch = batch_of(TokenTree.chain(range(3)), TokenTree.chain(range(2)), TokenTree.root_only(1))
    assert Bucket.of(batch) == Bucket(rows=8, sequences=4, blocks=2, words=1, logits=8)
    without = replace(batch, logits_indices=batch.logits_indices[:0])
    assert Bucket.of(without).logits == 0
    wide = batch_of(TokenTree.chain(range(130)))
    assert Bucket.of(wide) == Bucket(rows=256, sequences=1, blocks=64, words=4, logits=256)
    assert Bucket.of(batch_of(*[TokenTree.chain(range(100))] * 2, TokenTree.chain(range(57)), contexts=1)) is None


def test_padding_belongs_to_no_sequence():
    batch = batch_of(TokenTree.chain((5, 6, 7)), TokenTree.chain((8, 9)), TokenTree.root_only(4))
    filled = padded(batch, Bucket.of(batch), padding_slot=999)
    assert filled.slot_mapping.tolist()[6:] == [999, 999]
    assert filled.query_offsets.tolist() == [0, 3, 5, 6, 6]
    assert filled.context_lens.tolist() == [3, 3, 3, 0]
    assert (filled.block_tables[3] == -1).all()
    assert filled.logits_indices.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    for name in ("input_ids", "positions", "slot_mapping", "ancestor_words"):
        np.testing.assert_array_equal(getattr(filled, name)[:6], getattr(batch, name))


def test_each_bucket_is_recorded_once_and_the_oldest_dropped(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    backend = FakeBackend()
    graphed = GraphedForward(lambda batch: batch.input_ids[batch.logits_indices].float()[:, None], 63, CPU, backend)
    sizes = {n: batch_of(TokenTree.chain(range(n))) for n in (1, 2, 3, 4)}
    for n, recorded in ((3, 1), (4, 1), (1, 2), (4, 2), (2, 3), (4, 3), (1, 4)):
        assert graphed(sizes[n]).flatten().tolist() == list(range(n))
        assert (backend.recorded, graphed.num_graphs) == (recorded, min(recorded, 2)), n


def test_large_batches_run_without_a_graph(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_ROWS", 4)
    backend = FakeBackend()
    graphed = GraphedForward(lambda batch: batch.input_ids.float()[:, None], 63, CPU, backend)
    assert graphed(batch_of(TokenTree.chain(range(5)))).shape == (5, 1)
    assert backend.recorded == 0


@pytest.fixture(scope="module")
def models(tiny_model):
    config = load_config(tiny_model)
    plain = LlamaModel.load(tiny_model, config, torch.float32, CPU)
    return plain, FakeCudaLlama.load(tiny_model, config, torch.float32, CPU, attention=ragged_attention)


def test_graphs_change_no_bit_over_many_steps(models):
    """Sequences grow by trees of changing sizes: graphs are replayed with other contents, padding and block tables."""
    plain, graphed = (ModelRunner(model, num_blocks=64, block_size=4) for model in models)
    rng, shapes = random.Random(3), list(SHAPES.values())
    last = {seq_id: 5 + seq_id for seq_id in range(3)}
    for runner in (plain, graphed):
        for seq_id in last:
            runner.blocks.add(seq_id)
    for step in range(12):
        chosen = sorted(rng.sample(sorted(last), rng.choice([1, 2, 3])))
        trees = {
            s: shapes[(step + s) % len(shapes)](last[s], [7, 8, 9], rng.choice([2, 5, 9]), 60, rng) for s in chosen
        }
        for runner in (plain, graphed):
            for seq_id, tree in trees.items():
                runner.blocks.reserve(seq_id, len(tree))
        rows = [SequenceRows.from_tree(seq_id, tree) for seq_id, tree in trees.items()]
        for expected, logits in zip(plain.forward(rows), graphed.forward(rows), strict=True):
            np.testing.assert_array_equal(logits, expected)
        for seq_id, tree in trees.items():
            kept = (0, *tree.path(len(tree) - 1))
            last[seq_id] = tree.token_ids[-1]
            for runner in (plain, graphed):
                runner.commit(seq_id, kept)


def test_the_device_model_pads_into_a_slot_of_its_own(models):
    plain, graphed = models
    assert len(graphed.new_kv(3, 4).keys[0]) == 13
    assert len(plain.new_kv(3, 4).keys[0]) == 12
    assert isinstance(graphed, DeviceModel) and not isinstance(plain, DeviceModel)


def test_graphs_belong_to_one_cache(models):
    _, graphed = models
    first, second = graphed.new_kv(4, 4), graphed.new_kv(4, 4)
    batch = batch_of(TokenTree.root_only(5), contexts=0)
    graphed.forward(batch, first)
    assert not second.keys[0].any()
    graphed.forward(batch, second)
    assert torch.equal(first.keys[0][:4], second.keys[0][:4]) and second.keys[0].any()


def test_tensors_of_a_batch_are_the_same_by_either_way():
    batch = batch_of(TokenTree.chain((5, 6, 7)), TokenTree((1, 2, 3), (-1, 0, 0)))
    shared = TorchBatch.of(batch, CPU)
    from treeserve_engine.torch_batch import arrays_of
    from treeserve_engine.upload import upload

    copied = TorchBatch.from_tensors(upload(arrays_of(batch), CPU), batch.block_size)
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert torch.equal(getattr(shared, name), getattr(copied, name))
    for name in ("block_tables", "context_lens", "query_offsets", "node_offsets", "ancestor_words"):
        assert torch.equal(getattr(shared.attention, name), getattr(copied.attention, name))
