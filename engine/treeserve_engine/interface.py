"""What the engine asks of a model, whoever computes it: the native decoder, torch or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from treeserve_core.features import FeatureShape
from treeserve_engine.batch import ForwardBatch
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.decoder import HiddenStates


class ModelLimits(Protocol):
    """What the services must know of a model's configuration."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer, padding included."""

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of the context window."""


class Kv(Protocol):
    """A paged KV cache, made by the model that reads it."""

    @property
    def nbytes(self) -> int:
        """Memory it takes when full."""

    def move(self, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]) -> None:
        """Copy slot src[i] to slot dst[i] in every layer, as if in the order of i.

        Sources ascend within a sequence and none lies before its destination.
        """

    @property
    def block_nbytes(self) -> int:
        """Size of one block of every layer."""

    def save(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy a block of every layer to `data`, uint8[block_nbytes]: bytes that only `load` understands."""

    def load(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy what `save` wrote into any block."""


class Model(Protocol):
    """Weights and the forward pass. Stateless between calls; the KV cache is the caller's.

    Load and run a model in one thread.
    """

    @property
    def config(self) -> ModelLimits:
        """Its configuration."""

    def new_kv(self, num_blocks: int, block_size: int) -> Any:
        """An empty `Kv` of num_blocks * block_size slots."""

    def forward(self, batch: ForwardBatch, kv: Any) -> npt.NDArray[np.float32]:
        """Compute the rows of a batch, writing their K and V to their slots.

        Args:
            kv: made by this model's `new_kv`.

        Returns:
            Logits of the rows asked for, float32[K, vocab_size].
        """


@runtime_checkable
class HiddenModel(Model, Protocol):
    """A model that shows its hidden states and takes inputs in place of tokens."""

    @property
    def feature_shape(self) -> FeatureShape:
        """What drafters are sent of it."""

    def forward_hidden(self, batch: ForwardBatch, kv: Any, layers: Sequence[int]) -> HiddenStates:
        """`forward`, whose logits these are to the bit, with the hidden states behind them.

        Args:
            layers: after how many layers the batch's feature rows are wanted: ascending, each at least 1 and below the
                number of layers.
        """


@runtime_checkable
class RunModel(Model, Protocol):
    """A model that can decode many steps in a row by itself."""

    def decode(
        self,
        kv: Any,
        block_tables: Sequence[Sequence[int]],
        sequences: Sequence[RunSequence],
        terms: RunTerms,
        choose: Choose,
    ) -> Ran:
        """Run steps (`treeserve_kernels.cpu.decode_run`), whose tokens are those of `forward` and `accept`.

        Args:
            block_tables: KV blocks of each sequence, those reserved included.
            choose: chooses tokens where logits and noise do not do.
        """


@runtime_checkable
class DeviceModel(Model, Protocol):
    """A model whose logits can stay on a device that accepts trees itself (`device_accept`)."""

    def device_logits(self, batch: ForwardBatch, kv: Any) -> Any:
        """`forward` without waiting for the device: a tensor there, valid until the next pass."""
