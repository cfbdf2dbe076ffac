"""Training data on disk: what a target answered, and the distribution that it chose each token from.

A data folder holds `data.json` (what the data were made from) and shards `shard-00000.npz`, one numpy array per field:

    prompt_ids, prompt_offsets   prompt i is prompt_ids[prompt_offsets[i]:prompt_offsets[i + 1]]
    output_ids, output_offsets   likewise; top_ids and top_log_probs have one row per output token
    top_ids, top_log_probs       [tokens, 8], most probable first; ids uint16 where the vocabulary allows, else uint32
    kinds, temperatures, seeds   one per sample
    counts                       JSON text: how many answers the generator dropped and why

A shard appears whole or not at all, so a reader may follow a generator that is still running.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from zlib import crc32

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError

TOP_K = 8
Split = Literal["train", "validation"]
Counts = Mapping[str, int]

_FORMAT = 1
_ABOUT = "data.json"
# One prompt in this many is for validation.
_VALIDATION_EVERY = 50


@dataclass(frozen=True)
class Sample:
    """One answer of the target.

    Attributes:
        prompt_ids: as the router would send it, chat template applied.
        output_ids: what the target chose, the end-of-sequence token included where it came.
        kind: of the prompt: "qa", "story", "code" ...
        temperature: 0 is greedy.
        seed: of the noise.
        top_ids: uint16 or uint32[n, 8], the most probable tokens where output token i was chosen, best first.
        top_log_probs: float16[n, 8], theirs at temperature 1, before any processor.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    kind: str
    temperature: float
    seed: int
    top_ids: npt.NDArray[Any]
    top_log_probs: npt.NDArray[np.float16]


def split_of(prompt_ids: Sequence[int]) -> Split:
    """The split that a prompt belongs to, in every folder: about 2 % of them are for validation."""
    held_out = crc32(np.asarray(prompt_ids, "<u4").tobytes()) % _VALIDATION_EVERY == 0
    return "validation" if held_out else "train"


class ShardWriter:
    """Writes the shards of one folder.

    Args:
        folder: made if it does not exist.
        about: what the data are made from. A folder holds data of one making.

    Raises:
        InvalidArgumentError: if the folder holds data made from something else.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        about = {"format": _FORMAT, **about}
        path = folder / _ABOUT
        if not path.exists():
            path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        elif (found := json.loads(path.read_text(encoding="utf-8"))) != about:
            raise InvalidArgumentError("out", f"{folder} holds other data: {found}, not {about}")

    def has(self, index: int) -> bool:
        """Whether a shard is there already."""
        return _shard_path(self._folder, index).exists()

    def write(self, index: int, samples: Sequence[Sample], counts: Counts) -> None:
        """Write a shard whole or, if interrupted, not at all."""
        arrays: dict[str, Any] = {
            **_ragged("prompt", [sample.prompt_ids for sample in samples]),
            **_ragged("output", [sample.output_ids for sample in samples]),
            "top_ids": np.concatenate([sample.top_ids for sample in samples]),
            "top_log_probs": np.concatenate([sample.top_log_probs for sample in samples]),
            "kinds": np.array([sample.kind for sample in samples]),
            "temperatures": np.array([sample.temperature for sample in samples]),
            "seeds": np.array([sample.seed for sample in samples], np.uint64),
            "counts": np.array(json.dumps(dict(counts))),
        }
        path = _shard_path(self._folder, index)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
        unfinished.replace(path)


def read_about(folder: Path) -> dict[str, Any]:
    """What a folder's data were made from: model, tokenizer hash, vocabulary size, seed.

    Raises:
        InvalidArgumentError: if it holds no data, or of a format that this version does not read.
    """
    path = folder / _ABOUT
    if not path.is_file():
        raise InvalidArgumentError("data", f"{folder} holds no training data")
    about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if about.get("format") != _FORMAT:
        raise InvalidArgumentError("data", f"{folder} is of format {about.get('format')}, not {_FORMAT}")
    return about


def read_samples(folder: Path, *, split: Split) -> Iterator[Sample]:
    """The samples of a split, in the order of the shards.

    Raises:
        InvalidArgumentError: if the folder holds no data, or there is no such split.
    """
    if split not in get_args(Split):
        raise InvalidArgumentError("split", f"{split!r} is not one of {', '.join(get_args(Split))}")
    read_about(folder)
    return (sample for path in _shards(folder) for sample in _read(path) if split_of(sample.prompt_ids) == split)


def read_counts(folder: Path) -> dict[str, int]:
    """Output tokens, samples and dropped answers of all shards together."""
    total: dict[str, int] = {}
    for path in _shards(folder):
        with np.load(path) as shard:
            for name, count in json.loads(str(shard["counts"])).items():
                total[name] = total.get(name, 0) + count
    return total


def _read(path: Path) -> Iterator[Sample]:
    with np.load(path) as shard:
        arrays = {name: shard[name] for name in shard.files}
    prompts, outputs = (arrays[f"{name}_offsets"].tolist() for name in ("prompt", "output"))
    for i, kind in enumerate(arrays["kinds"].tolist()):
        rows = slice(outputs[i], outputs[i + 1])
        yield Sample(
            prompt_ids=tuple(arrays["prompt_ids"][prompts[i] : prompts[i + 1]].tolist()),
            output_ids=tuple(arrays["output_ids"][rows].tolist()),
            kind=kind,
            temperature=float(arrays["temperatures"][i]),
            seed=int(arrays["seeds"][i]),
            top_ids=arrays["top_ids"][rows],
            top_log_probs=arrays["top_log_probs"][rows],
        )


def _ragged(name: str, lists: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
    joined = np.concatenate([np.asarray(entries, np.uint32) for entries in lists])
    return {f"{name}_ids": joined, f"{name}_offsets": np.cumsum([0, *map(len, lists)], dtype=np.int64)}


def _shards(folder: Path) -> Iterable[Path]:
    return sorted(folder.glob("shard-*.npz"))


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.npz"
