"""CUDA graphs of the forward pass: one per bucket of batch sizes, recorded when the bucket first comes up.

A decode step of a small model is hundreds of kernels that take less time than their launches do. A graph launches them
at once, but only for the shapes and addresses it was recorded with. So a batch is padded to its bucket and copied into
the bucket's own input buffer. Padding rows belong to no sequence, write their KV to a slot that nobody reads, and
their logits are cut off; rows do not meet outside attention, so they change nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.batch import ForwardBatch
from treeserve_engine.torch_batch import TorchBatch, arrays_of
from treeserve_engine.upload import pack, unpack

# Larger batches compute longer than they launch.
MAX_ROWS = 256
# Least recently used graphs beyond this many are dropped.
MAX_GRAPHS = 48


@dataclass(frozen=True)
class Bucket:
    """Sizes of a padded batch, each a power of two: what a recorded graph depends on."""

    rows: int
    sequences: int
    blocks: int
    words: int
    logits: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self | None:
        """The smallest bucket that holds a batch; None if it is too large for a graph."""
        rows, words = batch.ancestor_words.shape
        sequences, blocks = batch.block_tables.shape
        if rows > MAX_ROWS:
            return None
        return cls(*map(_power_of_two, (rows, sequences, blocks, words, len(batch.logits_indices))))


def _power_of_two(n: int) -> int:
    """The smallest one that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def padded(batch: ForwardBatch, bucket: Bucket, padding_slot: int) -> ForwardBatch:
    """A batch of a bucket's sizes. Padding sequences have no rows; padding rows write to `padding_slot`."""

    def pad(array: npt.NDArray[Any], *shape: int, value: int = 0) -> npt.NDArray[Any]:
        widths = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
        return np.pad(array, widths, constant_values=value)

    return replace(
        batch,
        input_ids=pad(batch.input_ids, bucket.rows),
        positions=pad(batch.positions, bucket.rows),
        slot_mapping=pad(batch.slot_mapping, bucket.rows, value=padding_slot),
        block_tables=pad(batch.block_tables, bucket.sequences, bucket.blocks, value=-1),
        context_lens=pad(batch.context_lens, bucket.sequences),
        query_offsets=pad(batch.query_offsets, bucket.sequences + 1, value=int(batch.query_offsets[-1])),
        node_offsets=pad(batch.node_offsets, bucket.sequences),
        ancestor_words=pad(batch.ancestor_words, bucket.rows, bucket.words),
        logits_indices=pad(batch.logits_indices, bucket.logits),
    )


class GraphBackend(Protocol):
    """Records what a function does on the device."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Replays `run` on the same tensors, and the tensor that each replay fills. Calls `run` at least once."""


class CudaGraphBackend:
    """`torch.cuda.graph`, all graphs in one memory pool: a replay may overwrite what another graph returned."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """See `GraphBackend`. The first run, outside the graph, compiles kernels and sets libraries up."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return graph.replay, output


@dataclass(frozen=True)
class _Graph:
    inputs: torch.Tensor
    replay: Callable[[], object]
    output: torch.Tensor


class GraphedForward:
    """Runs a forward pass through the graph of the batch's bucket, recording it if there is none yet.

    Args:
        forward: computes a batch's logits; what it does must depend on shapes alone.
        padding_slot: a KV slot that no sequence has.
    """

    def __init__(
        self,
        forward: Callable[[TorchBatch], torch.Tensor],
        padding_slot: int,
        device: torch.device,
        backend: GraphBackend,
    ) -> None:
        self._forward = forward
        self._padding_slot = padding_slot
        self._device = device
        self._backend = backend
        self._graphs: OrderedDict[tuple[Bucket, int], _Graph] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [K, vocab_size] of a batch, valid until the next call."""
        bucket = Bucket.of(batch)
        if bucket is None:
            return self._forward(TorchBatch.of(batch, self._device))
        filled = padded(batch, bucket, self._padding_slot)
        inputs = pack(arrays_of(filled), self._device)
        key = (bucket, batch.block_size)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._record(filled, inputs)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph.inputs.copy_(inputs, non_blocking=True)
        graph.replay()
        return graph.output[: len(batch.logits_indices)]

    def _record(self, batch: ForwardBatch, packed: torch.Tensor) -> _Graph:
        inputs = packed.to(self._device, copy=True)
        tensors = TorchBatch.from_tensors(unpack(inputs, arrays_of(batch)), batch.block_size)
        return _Graph(inputs, *self._backend.record(lambda: self._forward(tensors)))
