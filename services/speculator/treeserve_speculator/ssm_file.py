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

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.array_file import FOOTER_BYTES, DamagedFileError, Item, map_arrays, write_arrays
from treeserve_engine.made_once import content_hash
from treeserve_engine.packed_weights import flat_items, layer_of, linear_of
from treeserve_kernels.cpu.decoder import DecoderWeights, LayerWeights
from treeserve_kernels.cpu.packing import PackedLinear

_KIND = "ssm 1"
_FIELD = "drafter_folder"


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
        try:
            items = map_arrays(path, lambda file: content_hash(file, cache_dir, skip_last=FOOTER_BYTES))
        except (DamagedFileError, OSError) as error:
            raise InvalidArgumentError(_FIELD, f"{path} cannot be used: {error}") from error
        if items.get("kind") != _KIND:
            raise InvalidArgumentError(_FIELD, f"{path} is {items.get('kind')!r}, not a draft model ({_KIND!r})")
        try:
            return cls._of(items)
        except (KeyError, TypeError) as error:
            raise InvalidArgumentError(_FIELD, f"{path} lacks a part: {error!r}") from error

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
        ids = self.token_ids
        if len(ids) != self.head.num_outputs or not (ids[0] >= 0 and ids[-1] < vocab_size and (np.diff(ids) > 0).all()):
            raise InvalidArgumentError(_FIELD, "the draft model's vocabulary is not one of the target's")

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
