"""Drafts with a small language model, which reads a sequence's tokens.

It is imported when a draft model is configured, and with it what loads one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.config import SSM
from treeserve_speculator.draft_model import BLOCK_SIZE, load_trained_model, load_whole_model, num_blocks
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.growth import Vocabulary
from treeserve_speculator.sources.levels import Draft, Job, LevelLimits, LevelSource


@dataclass(frozen=True)
class SsmLimits(LevelLimits):
    """Bounds of drafting with a language model.

    Attributes:
        cut_prefix: left out of the model's context where a sequence begins with it.
    """

    cut_prefix: tuple[int, ...] = ()


class SsmSource(LevelSource):
    """A draft model with a KV cache of its own."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: SsmLimits,
        eos_token_ids: frozenset[int],
        *,
        vocabulary: Vocabulary | None = None,
        name: str = SSM,
    ) -> None:
        """See `LevelSource`."""
        super().__init__(runner, limits, eos_token_ids, vocabulary=vocabulary, name=name)
        self._cut_prefix = limits.cut_prefix

    def _cut(self, state: DraftSequence) -> int:
        prefix = self._cut_prefix
        is_cut = len(state.tokens) > len(prefix) and tuple(state.tokens[: len(prefix)]) == prefix
        return len(prefix) if is_cut else 0

    def _compute(self, rows: Mapping[Job, SequenceRows]) -> Sequence[npt.NDArray[np.float32]]:
        return self._runner.forward(list(rows.values()))

    def _rows_to_keep(self, draft: Draft, committed: Sequence[int]) -> Sequence[int]:
        return draft.rows_along(committed)


def build(settings: SourceSettings) -> SsmSource:
    """The source as configured: with the whole model of `ssm_folder`, or one trained for the target.

    Raises:
        InvalidArgumentError: if the draft model's token ids do not mean the target's, or it is not supported.
    """
    config, name = settings.config, settings.name or SSM
    if name == SSM and config.ssm_folder is not None:
        loaded = load_whole_model(settings, config.ssm_folder)
    else:
        loaded = load_trained_model(settings, name)
    limits = SsmLimits(
        vocab_size=loaded.vocab_size,
        max_position=loaded.model.config.max_position_embeddings,
        cut_prefix=loaded.cut_prefix,
        depth=min(config.ssm_depth, config.max_depth),
        width=config.ssm_width,
    )
    runner = ModelRunner(loaded.model, num_blocks(config), BLOCK_SIZE)
    return SsmSource(runner, limits, settings.eos_token_ids, vocabulary=loaded.vocabulary, name=name)
