"""A trained draft head on disk: what it takes of the target's hidden states, int8 layers, a vocabulary of its own.

The token embedding is not in it: that is the target's, as are the sizes of the layer and the rotary positions.
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
from treeserve_core.features import FeatureShape
from treeserve_engine.array_file import Item, write_arrays
from treeserve_engine.packed_weights import flat_items, layer_of, linear_of
from treeserve_kernels.cpu.decoder import DecoderWeights, LayerWeights
from treeserve_kernels.cpu.packing import PackedLinear
from treeserve_speculator.drafter_files import FOLDER_FIELD, check_vocabulary, read_drafter

_KIND = "head 1"


@dataclass(frozen=True)
class HeadFile:
    """A draft head. N is the size of its vocabulary, H the target's hidden size, D the layers of its features.

    Attributes:
        shape: of the features it was trained on.
        token_ids: int64[N], ascending: the target's id of each output.
        from_features: from a committed token's features and its embedding, D H + H numbers, to H.
        from_hidden: from a drafted token's parent's last hidden state and its embedding, 2 H numbers, to H.
        layer: the decoder layer.
        norm: float32[H], before the output layer.
        head: from H to N.
    """

    shape: FeatureShape
    token_ids: npt.NDArray[np.int64]
    from_features: PackedLinear
    from_hidden: PackedLinear
    layer: LayerWeights
    norm: npt.NDArray[np.float32]
    head: PackedLinear

    def write(self, path: Path) -> None:
        """Write the file."""
        write_arrays(path, self._items())

    def _items(self) -> Iterator[tuple[str, Item]]:
        yield "kind", _KIND
        yield "feature_layers", np.array(self.shape.layers, dtype=np.int32)
        yield "hidden_size", self.shape.hidden_size
        yield "token_ids", self.token_ids.astype(np.int32)
        yield "norm", self.norm
        parts = ("from_features", "from_hidden", "layer", "head")
        yield from itertools.chain(*(flat_items(name, getattr(self, name)) for name in parts))

    @classmethod
    def read(cls, path: Path, cache_dir: Path) -> HeadFile:
        """Map a file read-only.

        Args:
            cache_dir: where the hashes of unchanged files are remembered.

        Raises:
            InvalidArgumentError: if it is damaged or no draft head of this version.
        """
        return read_drafter(path, _KIND, cls._of, cache_dir)

    @classmethod
    def _of(cls, items: Mapping[str, Any]) -> HeadFile:
        return cls(
            shape=FeatureShape(tuple(items["feature_layers"].tolist()), items["hidden_size"]),
            token_ids=items["token_ids"].astype(np.int64),
            from_features=linear_of(items, "from_features"),
            from_hidden=linear_of(items, "from_hidden"),
            layer=layer_of(items, "layer"),
            norm=items["norm"],
            head=linear_of(items, "head"),
        )

    def check(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError if its parts do not fit together, or not a target of `vocab_size` ids."""
        check_vocabulary(self.token_ids, self.head.num_outputs, vocab_size)
        hidden, depths = self.shape.hidden_size, len(self.shape.layers)
        for linear, inputs in ((self.from_features, (depths + 1) * hidden), (self.from_hidden, 2 * hidden)):
            if (linear.num_outputs, linear.num_inputs) != (hidden, inputs):
                raise InvalidArgumentError(
                    FOLDER_FIELD, "the draft head's projections have other sizes than its features"
                )

    def with_target(self, target: DecoderWeights) -> DecoderWeights:
        """The decoder, which is brought its inputs, with the target's rotary positions."""
        return DecoderWeights(
            embedding=None,
            layers=(self.layer,),
            norm=self.norm,
            head=self.head,
            rope_cos=target.rope_cos,
            rope_sin=target.rope_sin,
        )
