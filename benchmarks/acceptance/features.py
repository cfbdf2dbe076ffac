"""The target's hidden states along recorded outputs, as a verifier would send them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.acceptance.replay import Recording
from treeserve_core.features import FeatureRows
from treeserve_training.target_features import TargetFeatures


class RecordedFeatures:
    """Computes them once for each recording and keeps them: some 600 KB each for the default model.

    Args:
        open_target: loads the target when features are first asked for.
    """

    def __init__(self, open_target: Callable[[], TargetFeatures]) -> None:
        self._open_target = open_target
        self._target: TargetFeatures | None = None
        self._kept: dict[tuple[int, ...], FeatureRows] = {}

    def __call__(self, recording: Recording) -> FeatureRows:
        """Of the end of the prompt, as much as a verifier keeps, and of the output."""
        token_ids = (*recording.prompt_ids, *recording.output_ids)
        if token_ids not in self._kept:
            self._target = self._target or self._open_target()
            first = max(1, len(recording.prompt_ids) - self._target.shape.window_tokens)
            # A token's row is what was computed at the token before it.
            self._kept[token_ids] = FeatureRows(first, self._target.along(token_ids[:-1], first - 1))
        return self._kept[token_ids]
