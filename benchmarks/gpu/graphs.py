"""A model's decode steps with and without CUDA graphs: same logits, both times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.gpu.device import Device
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import ForwardBatch, SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.config import load_config
from treeserve_engine.cuda_graphs import GraphBackend
from treeserve_engine.cuda_model import CudaLlamaModel
from treeserve_engine.torch_batch import TorchBatch
from treeserve_kernels.triton.tree_attention import tree_attention_triton

BLOCK_SIZE = 16


@dataclass(frozen=True)
class GraphResult:
    """One batch: the largest difference of its logits with and without graphs, and median times in milliseconds.

    Padding to a bucket may make the matrix library choose another kernel, so bits may differ.
    """

    sequences: int
    nodes: int
    context_len: int
    max_difference: float
    tolerance: float
    eager_ms: float
    graph_ms: float

    @property
    def agrees(self) -> bool:
        """Whether the logits are the same up to rounding."""
        return self.max_difference <= self.tolerance

    def line(self) -> str:
        """For reading along."""
        return (
            f"{'ok ' if self.agrees else 'BAD'} forward of {self.sequences} trees of {self.nodes} after "
            f"{self.context_len}: differ by {self.max_difference:.1e}  ms: eager {self.eager_ms:.3f}, "
            f"graph {self.graph_ms:.3f}"
        )


class RunAgain:
    """Stands in for graphs where there are none: a replay runs the function again."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """See `GraphBackend`."""
        output = run().clone()
        return lambda: output.copy_(run()), output


class _Emulated(CudaLlamaModel):
    graph_backend: ClassVar[Callable[[], GraphBackend]] = RunAgain


def check_graphs(device: Device, folder: Path) -> Iterator[GraphResult]:
    """Trees after contexts of several lengths, in bfloat16 on a GPU and float32 in the interpreter."""
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    kind = CudaLlamaModel if device.is_cuda else _Emulated
    model = kind.load(folder, load_config(folder), dtype, device.torch, attention=tree_attention_triton)
    sizes = [(1, 1, 256), (1, 12, 256), (8, 1, 1000), (7, 16, 300)] if device.is_cuda else [(2, 3, 5)]
    for sequences, nodes, context_len in sizes:
        yield _check(model, device, sequences, nodes, context_len)


def _check(model: CudaLlamaModel, device: Device, sequences: int, nodes: int, context_len: int) -> GraphResult:
    blocks = BlockManager(sequences * (-(-(context_len + nodes) // BLOCK_SIZE) + 1), BLOCK_SIZE)
    kv = model.new_kv(blocks.total_blocks, BLOCK_SIZE)
    rng = random.Random(0)
    vocab_size = model.config.vocab_size
    for seq_id in range(sequences):
        blocks.add(seq_id)
        blocks.reserve(seq_id, context_len)
        tokens = [rng.randrange(vocab_size) for _ in range(context_len)]
        model.forward(build_batch([SequenceRows.from_chain(seq_id, tokens, [])], blocks), kv)
        blocks.commit(seq_id, range(context_len))
        blocks.reserve(seq_id, nodes)
    parents = (-1, *(rng.randrange(i) for i in range(1, nodes)))
    trees = [TokenTree(tuple(rng.sample(range(vocab_size), nodes)), parents) for _ in range(sequences)]
    batch = build_batch([SequenceRows.from_tree(seq_id, tree) for seq_id, tree in enumerate(trees)], blocks)

    def eager(batch: ForwardBatch = batch) -> torch.Tensor:
        return model.logits(TorchBatch.of(batch, device.torch), kv)

    expected, logits = eager(), model.device_logits(batch, kv)
    return GraphResult(
        sequences=sequences,
        nodes=nodes,
        context_len=context_len,
        max_difference=(expected - logits).abs().amax().item(),
        tolerance=(0.05 if device.is_cuda else 1e-4) * expected.abs().amax().item(),
        eager_ms=device.median_wall_ms(eager),
        graph_ms=device.median_wall_ms(lambda: model.device_logits(batch, kv)),
    )
