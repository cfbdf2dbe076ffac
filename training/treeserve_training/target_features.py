"""The target's hidden states along recorded tokens, from the engine that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import HiddenModel
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import FeatureDraftSource

_BLOCK_SIZE = 16
_CHUNK_ROWS = 256
_ALONE = -1  # a sequence's name while it is computed at once


class TargetFeatures:
    """Computes features, in int8 where the machine serves in int8: a drafter meets the numbers it was trained on.

    Args:
        max_tokens: of the longest sequence.
    """

    def __init__(self, model_folder: Path, cache_dir: Path, *, threads: int, max_tokens: int) -> None:
        model = load_model(model_folder, dtype="auto", device="cpu", threads=threads, cache_dir=cache_dir)
        if not isinstance(model, HiddenModel) or not model.feature_shape.layers:
            raise InvalidArgumentError(
                "model", "a head needs the target's hidden states, which this model does not show"
            )
        self.shape: FeatureShape = model.feature_shape
        self._runner = ModelRunner(model, -(-max_tokens // _BLOCK_SIZE) + 1, _BLOCK_SIZE)

    def along(self, token_ids: Sequence[int], first: int) -> npt.NDArray[np.float16]:
        """Features after the tokens from place `first` on: float16[len(token_ids) - first, D, H]."""
        self.open(_ALONE)
        try:
            return self.further(_ALONE, token_ids, first)
        finally:
            self.close(_ALONE)

    def open(self, seq_id: int) -> None:
        """Keep a sequence, so that it can be computed bit by bit."""
        self._runner.blocks.add(seq_id)

    def further(self, seq_id: int, token_ids: Sequence[int], first: int = 0) -> npt.NDArray[np.float16]:
        """Go on with a sequence: features after those of its tokens that were not computed before, from `first` on."""
        computed = self._runner.blocks.computed_len(seq_id)
        starts = range(computed, len(token_ids), _CHUNK_ROWS)
        return np.concatenate([self._chunk(seq_id, token_ids, start, first) for start in starts])

    def close(self, seq_id: int) -> None:
        """Let go of a sequence."""
        self._runner.blocks.free(seq_id)

    def _chunk(self, seq_id: int, token_ids: Sequence[int], start: int, first: int) -> npt.NDArray[np.float16]:
        chunk = list(token_ids[start : start + _CHUNK_ROWS])
        wanted = range(min(max(0, first - start), len(chunk)), len(chunk))
        rows = replace(SequenceRows.from_chain(seq_id, chunk, []), feature_rows=wanted)
        self._runner.blocks.reserve(seq_id, len(chunk))
        (states,) = self._runner.forward_hidden([rows], self.shape.layers)
        self._runner.commit(seq_id, range(len(chunk)))
        return FeatureRows.narrowed(0, states.features).values


class FedWithFeatures:
    """A source that is handed, along a recording, what a verifier would have sent it."""

    wants_top_tokens = False

    def __init__(self, source: FeatureDraftSource, features: TargetFeatures) -> None:
        self.name = source.name
        self._source = source
        self._features = features

    def open(self, state: DraftSequence) -> None:
        """Introduce a sequence."""
        self._features.open(state.handle)
        self._source.open(state)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Tell of new tokens."""
        self._source.commit(state, new_tokens, top_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The source's tree, once it has the features of all tokens."""
        assert state.features is not None
        known = len(state.tokens)
        if state.features.end < known > 1:
            new = self._features.further(state.handle, state.tokens[:-1])[-self._features.shape.window_tokens :]
            state.features.extend(FeatureRows(known - len(new), new))
        return self._source.propose(state, budget)

    def close(self, state: DraftSequence) -> None:
        """Let go of a sequence."""
        self._source.close(state)
        self._features.close(state.handle)
