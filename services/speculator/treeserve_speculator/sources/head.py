"""Drafts with a head over the target's hidden states, which the verifier sends with the tokens it commits.

After EAGLE-3 (Li et al., 2025): see `HeadFile` for what enters a row. A committed token's row is made of what the
target itself had computed; a drafted one's of the head's own last hidden state at its parent. What was drafted is
therefore computed anew once it is committed: with the target's features it is worth more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureShape
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.native_model import NativeModel
from treeserve_engine.packed_weights import packed_weights
from treeserve_engine.precision import AUTO, choose_precision
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decoder import apply_linear
from treeserve_speculator.config import HEAD
from treeserve_speculator.draft_model import BLOCK_SIZE, num_blocks
from treeserve_speculator.head_file import HeadFile
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.levels import Cached, Draft, Job, LevelLimits, LevelSource

Float32Array = npt.NDArray[np.float32]

_EPSILON = 1e-6  # of the inputs' normalisation

_log = structlog.get_logger(__name__)


class HeadSource(LevelSource):
    """A draft head. A sequence whose features are missing, damaged or not up to date gets no trees.

    Args:
        embedding: float32[V, H], the target's; a row is read for each token.
    """

    def __init__(
        self, runner: ModelRunner, file: HeadFile, embedding: Float32Array, limits: LevelLimits, eos: frozenset[int]
    ) -> None:
        super().__init__(runner, limits, eos, vocabulary=file.token_ids, name=HEAD)
        self._file = file
        self._embedding = embedding
        self._hidden: dict[int, dict[int, Float32Array]] = {}  # by sequence: of the nodes expanded so far

    @property
    def feature_shape(self) -> FeatureShape:
        """What it was trained on."""
        return self._file.shape

    def close(self, state: DraftSequence) -> None:
        """Forget a sequence."""
        cached: Cached | None = state.source_state.get(self.name)
        if cached is not None:
            self._hidden.pop(cached.seq_id, None)
        super().close(state)

    def _job(self, state: DraftSequence, budget: int) -> Job | None:
        cached: Cached = state.source_state[self.name]
        features = state.features
        if features is None or features.end < len(state.tokens) or features.start == features.end:
            self._forget(cached)
            return None
        self._keep_accepted(state, cached)
        next_row = cached.cut + self._runner.blocks.computed_len(cached.seq_id)
        if next_row < features.start or len(state.tokens) - cached.cut >= self._limits.max_position:
            self._forget(cached)  # features in between were lost, or the window is full: begin with what is there
        if self._runner.blocks.computed_len(cached.seq_id) == 0:
            cached.cut = features.start
        return super()._job(state, budget)

    def _rows_to_keep(self, draft: Draft, committed: Sequence[int]) -> Sequence[int]:
        return range(len(draft.chain))

    def _compute(self, rows: Mapping[Job, SequenceRows]) -> Sequence[Float32Array]:
        wanted = [replace(r, inputs=self._inputs(job, r)) for job, r in rows.items()]
        states = self._runner.forward_hidden(wanted)
        for (job, r), state in zip(rows.items(), states, strict=True):
            if r.node_offset == 0:
                self._hidden[job.cached.seq_id] = {}
            if len(r.logits_rows) and job.cached.draft is not None:
                self._hidden[job.cached.seq_id].update(zip(job.cached.draft.level, state.last, strict=True))
        return [state.logits for state in states]

    def _inputs(self, job: Job, rows: SequenceRows) -> Float32Array:
        """What enters the decoder: float32[rows, H]."""
        embedded = self._embedding[np.asarray(rows.token_ids)]
        if rows.node_offset:
            assert job.cached.draft is not None  # later levels are part of one
            draft, hidden = job.cached.draft, self._hidden[job.cached.seq_id]
            before = np.stack([hidden[draft.growth.parents[node]] for node in draft.level])
            return apply_linear(_joined(before, embedded), self._file.from_hidden)
        first = job.cached.cut + self._runner.blocks.computed_len(job.cached.seq_id)
        found = job.state.features.since(first) if job.state.features is not None else None
        assert found is not None and found.first == first  # `_job` looked
        features = found.values[: len(embedded)].astype(np.float32)
        return apply_linear(_joined(features, embedded), self._file.from_features)


def _joined(first: Float32Array, second: Float32Array) -> Float32Array:
    """Vectors [rows, ..., H] and [rows, H], each at a root mean square of 1, in one row."""
    return np.concatenate([_unit(first).reshape(len(first), -1), _unit(second)], axis=1)


def _unit(x: Float32Array) -> Float32Array:
    squares = np.mean(np.square(x), axis=-1, keepdims=True)
    scaled: Float32Array = x / np.sqrt(squares + np.float32(_EPSILON))
    return scaled


def build(settings: SourceSettings) -> HeadSource:
    """The source as configured, with the head trained for the target.

    Raises:
        InvalidArgumentError: if there is none, it is damaged or was made for another target, or the native
            decoder is not built.
    """
    config = settings.config
    precision = choose_precision(config.model_folder, "int8", AUTO, "cpu")
    if not precision.is_native:
        raise InvalidArgumentError("sources", "the head source runs on the native decoder, which is not built here")
    target_config = load_config(config.model_folder)
    file = HeadFile.read(settings.trained_file(HEAD, target_config.hidden_size), config.cache_dir)
    file.check(settings.vocab_size)
    target = packed_weights(config.model_folder, config.cache_dir, _log.info)
    assert target.embedding is not None  # checkpoints have one
    model = NativeModel(
        replace(target_config, num_layers=1),
        file.with_target(target),
        kv_dtype=precision.kv_dtype,
        threads=config.threads,
    )
    limits = LevelLimits(
        vocab_size=settings.vocab_size,
        max_position=target_config.max_position_embeddings,
        depth=min(config.ssm_depth, config.max_depth),
        width=config.ssm_width,
    )
    runner = ModelRunner(model, num_blocks(config), BLOCK_SIZE)
    return HeadSource(runner, file, target.embedding, limits, settings.eos_token_ids)
