"""The target's hidden states along recorded tokens, from the engine that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

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

_log = structlog.get_logger(__name__)


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
        self._runner.blocks.add(0)
        try:
            parts = [self._chunk(token_ids, start, first) for start in range(0, len(token_ids), _CHUNK_ROWS)]
        finally:
            self._runner.blocks.free(0)
        return np.concatenate(parts)

    def _chunk(self, token_ids: Sequence[int], start: int, first: int) -> npt.NDArray[np.float16]:
        chunk = list(token_ids[start : start + _CHUNK_ROWS])
        rows = SequenceRows.from_chain(0, chunk, [])
        rows = replace(rows, feature_rows=range(min(max(0, first - start), len(chunk)), len(chunk)))
        self._runner.blocks.reserve(0, len(chunk))
        (states,) = self._runner.forward_hidden([rows], self.shape.layers)
        self._runner.commit(0, range(len(chunk)))
        return FeatureRows.narrowed(0, states.features).values


class FedWithFeatures:
    """A source that is handed, along a recording, what a verifier would have sent it.

    Args:
        outputs: of a sequence that begins with these prompt tokens, so that its features are computed in one go.
    """

    wants_top_tokens = False

    def __init__(self, source: FeatureDraftSource, features: TargetFeatures) -> None:
        self.name = source.name
        self._source = source
        self._features = features

    def open(self, state: DraftSequence) -> None:
        """Introduce a sequence."""
        self._source.open(state)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Tell of new tokens."""
        self._source.commit(state, new_tokens, top_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The source's tree, once it has the features of all tokens."""
        assert state.features is not None
        known = len(state.tokens)
        first = max(1, state.features.end, known - self._features.shape.window_tokens)
        if first < known:
            state.features.extend(FeatureRows(first, self._features.along(state.tokens[: known - 1], first - 1)))
        return self._source.propose(state, budget)

    def close(self, state: DraftSequence) -> None:
        """Let go of a sequence."""
        self._source.close(state)
