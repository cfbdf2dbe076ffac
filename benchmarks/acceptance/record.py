"""Plain outputs of the target by the real engine and the real sampler, kept in the cache for the next run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.sampling import SamplingParams
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.made_once import cache_key, content_hash
from treeserve_engine.next_token import next_token
from treeserve_engine.processors import TokenContext
from treeserve_engine.runner import ModelRunner
from treeserve_engine.weight_files import weight_files

TOP = 8
_VERSION = 1  # of the file and of what decides its content
_AT_ONCE = 8
_BLOCK_SIZE = 16
_PREFILL_ROWS = 256


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and how it is to be answered."""

    kind: str
    token_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, eq=False)
class PlainOutput:
    """What the target answered: a `Recording` of `benchmarks.acceptance.replay`."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    kind: str
    temperature: float
    seed: int
    top_ids: npt.NDArray[Any]


class Recorder:
    """Decodes prompts plainly, several side by side, as the engine's exact mode allows: a batch changes no token.

    Args:
        load: loads the model; called only if the cache lacks something.
        model_key: names the model and its numeric mode, see `model_key`.
        folder: where recordings are kept.
        max_tokens: where an output that does not end by itself is cut.
        report: told in one line how far it is.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        model_key: str,
        folder: Path,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._load = load
        self._model_key = model_key
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._report = report

    def record(self, prompts: Sequence[Prompt]) -> list[PlainOutput]:
        """The output of each prompt, in order."""
        missing = [p for p in dict.fromkeys(prompts) if not self._file(p).exists()]
        if missing:
            self._decode_all(missing)
        return [self._read(prompt) for prompt in prompts]

    def _file(self, prompt: Prompt) -> Path:
        key = cache_key(_VERSION, self._model_key, self._max_tokens, prompt.temperature, prompt.seed, *prompt.token_ids)
        return self._folder / f"{key}.npz"

    def _read(self, prompt: Prompt) -> PlainOutput:
        with np.load(self._file(prompt)) as file:
            output, top_ids = tuple(file["output_ids"].tolist()), file["top_ids"]
        return PlainOutput(prompt.token_ids, output, prompt.kind, prompt.temperature, prompt.seed, top_ids)

    def _write(self, sequence: _Decoding) -> None:
        output_ids, top_ids = np.array(sequence.output, dtype=np.int32), np.array(sequence.top_ids)
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".unfinished", delete=False) as file:
            np.savez_compressed(file, output_ids=output_ids, top_ids=top_ids)
        Path(file.name).rename(self._file(sequence.prompt))

    def _decode_all(self, prompts: Sequence[Prompt]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        longest = max(len(p.token_ids) for p in prompts) + self._max_tokens
        runner = ModelRunner(self._load(), _AT_ONCE * -(-longest // _BLOCK_SIZE), _BLOCK_SIZE)
        waiting = iter(prompts)
        running: list[_Decoding] = []
        done = 0
        while True:
            while len(running) < _AT_ONCE and (prompt := next(waiting, None)) is not None:
                running.append(_Decoding.begin(runner, prompt, self._vocab_size))
            if not running:
                break
            ended = [s for s in running if s.output[-1] in self._eos_token_ids or len(s.output) == self._max_tokens]
            for sequence in ended:
                runner.blocks.free(sequence.seq_id)
                running.remove(sequence)
                self._write(sequence)
                done += 1
                self._report(f"recorded {done} of {len(prompts)} outputs")
            if running and not ended:
                _step(runner, running)


@dataclass(eq=False)
class _Decoding:
    """One sequence while it is decoded."""

    seq_id: int
    prompt: Prompt
    context: TokenContext
    params: SamplingParams
    vocab_size: int
    output: list[int]
    top_ids: list[npt.NDArray[np.uint32]]

    @classmethod
    def begin(cls, runner: ModelRunner, prompt: Prompt, vocab_size: int) -> _Decoding:
        """Compute the prompt and choose the first token."""
        params = SamplingParams(temperature=prompt.temperature, seed=prompt.seed)
        sequence = cls(id(prompt), prompt, TokenContext(prompt.token_ids), params, vocab_size, [], [])
        runner.blocks.add(sequence.seq_id)
        for chunk, is_last in _chunks(prompt.token_ids):
            runner.blocks.reserve(sequence.seq_id, len(chunk))
            wanted = (len(chunk) - 1,) if is_last else ()
            (logits,) = runner.forward([SequenceRows.from_chain(sequence.seq_id, chunk, wanted)])
            runner.commit(sequence.seq_id, range(len(chunk)))
        sequence.choose(logits[0])
        return sequence

    def choose(self, logits: npt.NDArray[np.float32]) -> None:
        """Append the next token, given its logits."""
        logits = logits[: self.vocab_size]
        position = len(self.prompt.token_ids) + len(self.output)
        self.output.append(next_token(logits, self.params, self.context, position))
        self.context.push(self.output[-1])
        self.top_ids.append(_most_probable(logits))


def _step(runner: ModelRunner, running: Sequence[_Decoding]) -> None:
    """One token for each sequence."""
    for sequence in running:
        runner.blocks.reserve(sequence.seq_id, 1)
    rows = [SequenceRows.from_chain(s.seq_id, s.output[-1:], (0,)) for s in running]
    for sequence, logits in zip(running, runner.forward(rows), strict=True):
        runner.commit(sequence.seq_id, (0,))
        sequence.choose(logits[0])


def _chunks(token_ids: Sequence[int]) -> Iterator[tuple[Sequence[int], bool]]:
    """Prefill chunks, and whether each is the last."""
    for start in range(0, len(token_ids), _PREFILL_ROWS):
        yield token_ids[start : start + _PREFILL_ROWS], start + _PREFILL_ROWS >= len(token_ids)


def _most_probable(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Ids of the largest logits, largest first."""
    ids = np.argpartition(logits, -TOP)[-TOP:]
    return ids[np.lexsort((ids, -logits[ids]))].astype(np.uint32)


def model_key(folder: Path, dtype: str, cache: Path) -> str:
    """Name of a model's weights in a numeric mode: the same weights have the same, wherever they lie."""
    return " ".join([dtype, *(content_hash(path, cache) for path in weight_files(folder))])
