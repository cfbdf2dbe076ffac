"""A trained draft model on disk: int8 layers and an output layer over a vocabulary of its own.

The token embedding is not in it: that is the target's, as are the sizes of a layer and the rotary positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_engine.array_file import Item, write_arrays
from treeserve_engine.packed_weights import flat_items, layer_of, linear_of
from treeserve_kernels.cpu.decoder import DecoderWeights, LayerWeights
from treeserve_kernels.cpu.packing import PackedLinear
from treeserve_speculator.drafter_files import check_vocabulary, read_drafter

_KIND = "ssm 1"


@dataclass(frozen=True)
class SsmFile:
    """A draft model without its embedding. N is the size of its vocabulary, H the target's hidden size.

    Attributes:
        token_ids: int64[N], ascending: the target's id of each output.
        cut_prefix: tokens that the model was trained without where a sequence begins with them.
        layers: from the first to the last.
        norm: float32[H], before the head.
        head: from H to N.
    """

    token_ids: npt.NDArray[np.int64]
    cut_prefix: tuple[int, ...]
    layers: tuple[LayerWeights, ...]
    norm: npt.NDArray[np.float32]
    head: PackedLinear

    def write(self, path: Path) -> None:
        """Write the file."""
        write_arrays(path, self._items())

    def _items(self) -> Iterator[tuple[str, Item]]:
        yield "kind", _KIND
        yield "num_layers", len(self.layers)
        yield "token_ids", self.token_ids.astype(np.int32)
        yield "cut_prefix", np.array(self.cut_prefix, dtype=np.int32)
        yield "norm", self.norm
        layers = (flat_items(f"layers.{i}", layer) for i, layer in enumerate(self.layers))
        yield from itertools.chain(flat_items("head", self.head), *layers)

    @classmethod
    def read(cls, path: Path, cache_dir: Path) -> SsmFile:
        """Map a file read-only.

        Args:
            cache_dir: where the hashes of unchanged files are remembered.

        Raises:
            InvalidArgumentError: if it is damaged or no draft model of this version.
        """
        return read_drafter(path, _KIND, cls._of, cache_dir)

    @classmethod
    def _of(cls, items: Mapping[str, Any]) -> SsmFile:
        return cls(
            token_ids=items["token_ids"].astype(np.int64),
            cut_prefix=tuple(items["cut_prefix"].tolist()),
            layers=tuple(layer_of(items, f"layers.{i}") for i in range(items["num_layers"])),
            norm=items["norm"],
            head=linear_of(items, "head"),
        )

    def check(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError if the vocabulary is no ascending part of the target's `vocab_size` ids."""
        check_vocabulary(self.token_ids, self.head.num_outputs, vocab_size)

    def with_target(self, target: DecoderWeights) -> DecoderWeights:
        """The whole draft model, with the target's embedding and rotary positions."""
        return DecoderWeights(
            embedding=target.embedding,
            layers=self.layers,
            norm=self.norm,
            head=self.head,
            rope_cos=target.rope_cos,
            rope_sin=target.rope_sin,
        )
