"""Continues many prompts at once with the real engine: continuous batching, and a fast choice of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.runner import ModelRunner
from treeserve_training.loops import loop_start
from treeserve_training.records import TOP_K

FloatArray = npt.NDArray[np.float32]

_BLOCK_SIZE = 16
_POSITIONS_PER_SEQUENCE = 768  # of KV, on average and at most
_PREFILL_ROWS = 256  # of one step, all sequences together
_LOOP_CHECK_EVERY = 32
_ROWS_AT_ONCE = 8  # whose logits fit in a core's cache
_FOLDS = 64


@dataclass(frozen=True)
class Task:
    """A prompt to continue.

    Attributes:
        max_tokens: of the continuation.
        temperature: 0 is greedy.
        seed: of the noise.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """A continuation.

    Attributes:
        output_ids: with the end-of-sequence token, if `ended`; without the repetition, if `looped`.
        top_ids, top_log_probs: uint32 and float16[n, 8], of the distribution that each output token was chosen from.
    """

    output_ids: tuple[int, ...]
    top_ids: npt.NDArray[np.uint32]
    top_log_probs: npt.NDArray[np.float16]
    ended: bool
    looped: bool


@dataclass(frozen=True)
class Choices:
    """What was chosen from the logits of each of n rows, and their most probable tokens, best first."""

    token_ids: list[int]
    top_ids: npt.NDArray[np.uint32]
    top_log_probs: npt.NDArray[np.float16]


@dataclass
class _Running:
    index: int
    task: Task
    pending: list[int]  # tokens to compute before the next one is chosen
    uniforms: npt.NDArray[np.float64]  # one per output token
    output: list[int] = field(default_factory=list)
    top: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16]]] = field(default_factory=list)
    ended: bool = False
    looped: bool = False

    def push(self, token_id: int, top: tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16]], ends: bool) -> None:
        self.output.append(token_id)
        self.top.append(top)
        self.pending = [token_id]
        self.ended = ends
        if len(self.output) % _LOOP_CHECK_EVERY == 0:
            self.looped = loop_start(self.output) is not None

    @property
    def is_done(self) -> bool:
        return self.ended or self.looped or len(self.output) == self.task.max_tokens

    def answer(self) -> Answer:
        kept = loop_start(self.output)
        n = len(self.output) if kept is None else kept
        ids, log_probs = (np.array([top[i] for top in self.top[:n]]).reshape(n, TOP_K) for i in (0, 1))
        return Answer(tuple(self.output[:n]), ids, log_probs, self.ended and kept is None, kept is not None)


class Answerer:
    """Continues prompts, `width` of them at a time; as one ends, the next joins.

    An answer depends on its task alone, not on those beside it: the engine computes the same bits in any batch, and
    the noise of a task comes from its seed.

    Args:
        vocab_size: ids to choose from; the model's output layer may have more rows.
        eos_token_ids: end a continuation.
        width: memory for the KV of so many sequences of ordinary length is taken at once.
        on_tokens: told of each step's tokens.
    """

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        width: int,
        on_tokens: Callable[[int], None],
    ) -> None:
        self._runner = ModelRunner(model, width * _POSITIONS_PER_SEQUENCE // _BLOCK_SIZE, _BLOCK_SIZE)
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._width = width
        self._on_tokens = on_tokens
        self._promised_blocks = 0  # what the running sequences need at their longest

    @property
    def max_positions(self) -> int:
        """The most tokens that a prompt and its continuation may have together."""
        limit: int = self._runner.model.config.max_position_embeddings
        return min(limit, self._runner.blocks.total_blocks * _BLOCK_SIZE)

    def answer(self, tasks: Sequence[Task]) -> list[Answer]:
        """The continuation of each task.

        Raises:
            ValueError: if a prompt is empty, or with its continuation longer than `max_positions`.
        """
        if any(not task.prompt_ids or _positions(task) > self.max_positions for task in tasks):
            raise ValueError(f"a prompt is empty or, with its continuation, over {self.max_positions} tokens")
        waiting = list(enumerate(tasks))[::-1]
        running: list[_Running] = []
        answers: dict[int, Answer] = {}
        while waiting or running:
            while waiting and len(running) < self._width and self._fits(waiting[-1][1]):
                running.append(self._begin(*waiting.pop()))
            self._step(running)
            for sequence in [sequence for sequence in running if sequence.is_done]:
                running.remove(sequence)
                answers[sequence.index] = sequence.answer()
                self._runner.blocks.free(sequence.index)
                self._promised_blocks -= _blocks(sequence.task)
        return [answers[index] for index in range(len(tasks))]

    def _fits(self, task: Task) -> bool:
        return self._promised_blocks + _blocks(task) <= self._runner.blocks.total_blocks

    def _begin(self, index: int, task: Task) -> _Running:
        self._runner.blocks.add(index)
        self._promised_blocks += _blocks(task)
        uniforms = np.random.default_rng(task.seed).random(task.max_tokens)
        return _Running(index, task, list(task.prompt_ids), uniforms)

    def _step(self, running: Sequence[_Running]) -> None:
        chunks = list(_chunks(running))
        for sequence, chunk in chunks:
            self._runner.blocks.reserve(sequence.index, len(chunk))
        rows = [_rows(sequence, chunk) for sequence, chunk in chunks]
        logits, _ = self._runner.compute(rows, self._runner.model.forward)
        for sequence, chunk in chunks:
            self._runner.commit(sequence.index, range(len(chunk)))
            del sequence.pending[: len(chunk)]
        choosing = [sequence for sequence, _ in chunks if not sequence.pending]
        if not choosing:
            return
        temperatures = [sequence.task.temperature for sequence in choosing]
        uniforms = [sequence.uniforms[len(sequence.output)] for sequence in choosing]
        choices = choose(logits[:, : self._vocab_size], temperatures, uniforms)
        for i, sequence in enumerate(choosing):
            token_id = choices.token_ids[i]
            sequence.push(token_id, (choices.top_ids[i], choices.top_log_probs[i]), token_id in self._eos)
        self._on_tokens(len(choosing))


def choose(logits: FloatArray, temperatures: Sequence[float], uniforms: Sequence[float]) -> Choices:
    """Choose a token from each row of logits.

    A draw is by inversion: exact, but with other noise than `next_token`'s.

    Args:
        logits: float32[n, vocab_size].
        temperatures: of each row; 0 is greedy.
        uniforms: for each row a number in [0, 1) to draw with.
    """
    starts = range(0, len(logits), _ROWS_AT_ONCE)
    parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
    blocks = [_choose(logits[part], temperatures[part], uniforms[part]) for part in parts]
    return Choices(
        [token_id for block in blocks for token_id in block.token_ids],
        np.concatenate([block.top_ids for block in blocks]),
        np.concatenate([block.top_log_probs for block in blocks]),
    )


def _choose(logits: FloatArray, temperatures: Sequence[float], uniforms: Sequence[float]) -> Choices:
    """`choose` for few rows. A row is folded so that id = fold * columns + column: columns reduce in vector code."""
    folded = _folded(logits)
    columns = folded.shape[2]
    peaks = folded.max(axis=1)
    best_columns = np.argpartition(-peaks, TOP_K, axis=1)[:, :TOP_K]  # the largest logits are all in these
    candidates = np.take_along_axis(folded, best_columns[:, None, :], axis=2).reshape(len(logits), -1)
    candidate_ids = (np.arange(_FOLDS)[:, None] * columns + best_columns[:, None, :]).reshape(len(logits), -1)
    order = np.lexsort((candidate_ids, -candidates), axis=1)[:, :TOP_K]
    top_ids = np.take_along_axis(candidate_ids, order, axis=1)
    top = np.take_along_axis(candidates, order, axis=1)

    weights = np.exp(folded - top[:, :1, None])
    token_ids = top_ids[:, 0].tolist()
    for row, (temperature, uniform) in enumerate(zip(temperatures, uniforms, strict=True)):
        if temperature:
            token_ids[row] = _drawn(weights[row], temperature, uniform)
    log_probs = top - top[:, :1] - np.log(weights.sum(axis=(1, 2), dtype=np.float64))[:, None]
    return Choices(token_ids, top_ids.astype(np.uint32), log_probs.astype(np.float16))


def _drawn(weights: FloatArray, temperature: float, uniform: float) -> int:
    """An id drawn in proportion to weights[fold, column] ** (1 / temperature): first its column, then its fold."""
    if temperature != 1.0:
        weights = weights ** np.float32(1.0 / temperature)
    masses = weights.sum(axis=0, dtype=np.float64)
    reached = uniform * float(masses.sum())
    column = _inverse(masses, reached)
    fold = _inverse(weights[:, column].astype(np.float64), reached - float(masses[:column].sum()))
    return fold * len(masses) + column


def _inverse(masses: npt.NDArray[np.float64], reached: float) -> int:
    """The first index up to which the masses add up to more than `reached`; never one without mass."""
    index = int(np.searchsorted(np.cumsum(masses), reached, side="right"))
    if index < len(masses) and masses[index] > 0:
        return index
    return int(np.flatnonzero(masses)[-1])


def _folded(logits: FloatArray) -> FloatArray:
    """float32[n, folds, columns], filled up with -inf."""
    n, vocab_size = logits.shape
    columns = max(-(-vocab_size // _FOLDS), TOP_K + 1)
    if columns * _FOLDS != vocab_size:
        padding = np.full((n, columns * _FOLDS - vocab_size), -np.inf, np.float32)
        logits = np.concatenate([logits, padding], axis=1)
    return logits.reshape(n, _FOLDS, columns)


def _chunks(running: Sequence[_Running]) -> Iterator[tuple[_Running, list[int]]]:
    """What each sequence computes in a step: its last token, or as much of its prompt as there is room for."""
    room = _PREFILL_ROWS
    for sequence in running:
        if sequence.output:
            yield sequence, sequence.pending
        elif room:
            chunk = sequence.pending[:room]
            room -= len(chunk)
            yield sequence, chunk


def _rows(sequence: _Running, chunk: Sequence[int]) -> SequenceRows:
    is_last = len(chunk) == len(sequence.pending)
    return SequenceRows.from_chain(sequence.index, chunk, (len(chunk) - 1,) if is_last else ())


def _positions(task: Task) -> int:
    return len(task.prompt_ids) + task.max_tokens


def _blocks(task: Task) -> int:
    return -(-_positions(task) // _BLOCK_SIZE)
