"""The Llama decoder on a CUDA device: forward passes through CUDA graphs, logits that may stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.batch import ForwardBatch
from treeserve_engine.cuda_graphs import CudaGraphBackend, GraphBackend, GraphedForward
from treeserve_engine.kv_cache import KvCache
from treeserve_engine.model import LlamaModel


class CudaLlamaModel(LlamaModel):
    """`LlamaModel` on a CUDA device. It keeps the graphs of one KV cache, the last one used."""

    graph_backend: ClassVar[Callable[[], GraphBackend]] = CudaGraphBackend

    _graphed: tuple[KvCache, GraphedForward] | None = None

    def new_kv(self, num_blocks: int, block_size: int) -> KvCache:
        """An empty cache, with one slot more: padding rows of graphs write to it."""
        return KvCache.allocate(self.config, num_blocks * block_size + 1, self._kv_dtype, self.device, block_size)

    def forward(self, batch: ForwardBatch, kv: KvCache) -> npt.NDArray[np.float32]:
        """See `LlamaModel.forward`."""
        logits: npt.NDArray[np.float32] = self.device_logits(batch, kv).cpu().numpy()
        return logits

    def device_logits(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """`forward` without waiting for the device: float32[K, vocab_size] there, valid until the next pass."""
        if self._graphed is None or self._graphed[0] is not kv:
            padding_slot = len(kv.keys[0]) - 1
            forward = partial(self.logits, kv=kv)
            self._graphed = (kv, GraphedForward(forward, padding_slot, self.device, type(self).graph_backend()))
        return self._graphed[1](batch)
