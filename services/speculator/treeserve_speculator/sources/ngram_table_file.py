"""The file of an n-gram table: for a context of a few tokens, how the target goes on, mapped read-only and shared.

Contexts are not stored, only where their hash leads: its upper half chooses a bucket, its lowest 16 bits are a
fingerprint, compared with those of the few contexts in that bucket. An unknown context is taken for a known one about
once in ten thousand look-ups, which costs a few useless nodes. A context takes 5 bytes and each token that may follow
it 3: the id, and its log-probability in sixteenths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.array_file import write_arrays
from treeserve_speculator.drafter_files import FOLDER_FIELD, read_drafter

_KIND = "ngram table 1"
_CONTEXTS_PER_BUCKET = 4
# Of a context without its tokens: fingerprint, length, and its part of a bucket's two offsets.
BYTES_PER_CONTEXT = 3 + 8 // _CONTEXTS_PER_BUCKET
# At most, of the index, the padding between arrays, and the last bucket.
FILE_OVERHEAD = 2048
MAX_SUCCESSORS = 255  # of a context
_STEPS_PER_NAT = 16
_LOG_PROBS = tuple(-step / _STEPS_PER_NAT for step in range(256))
_PROBABILITIES = tuple(map(math.exp, _LOG_PROBS))
_LEAST_REMAINDER = 1e-4
# Unpacked contexts that are kept: a tree shares most of its contexts with the tree before it.
_CACHED_CONTEXTS = 4096

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
EMPTY_CONTEXT = 0  # hash of the context of no tokens

UInt64Array = npt.NDArray[np.uint64]


def longer_context(context_hash: int, token_id: int) -> int:
    """Hash of a context with one token more at its far end: contexts grow from the latest token backwards."""
    mixed = (context_hash + token_id + 1) * _MULTIPLIER & _MASK_64
    return mixed ^ (mixed >> 29)


def longer_contexts(context_hashes: UInt64Array, token_ids: UInt64Array) -> UInt64Array:
    """`longer_context` of arrays."""
    mixed = (context_hashes + token_ids + np.uint64(1)) * np.uint64(_MULTIPLIER)
    return mixed ^ (mixed >> np.uint64(29))


@dataclass(frozen=True)
class TableIdentity:
    """Whose tokens a table speaks of.

    Attributes:
        tokenizer_hash: identity of the target's tokenizer.
        vocab_size: token ids are below it.
    """

    tokenizer_hash: str
    vocab_size: int


@dataclass(frozen=True)
class Calibration:
    """How a table's probabilities q become weights, proportional to the chance that the target chooses a token.

    At temperature T a token weighs q^exponent, `again` times as much if the sequence has shown it before, and
    exp(noise T G) times as much if the target's Gumbel noise for it is G. All tokens that a context does not name,
    whose share is r, weigh rest r^exponent exp(rest_noise T) together.
    """

    exponent: float = 1.0
    again: float = 1.0
    noise: float = 1.0
    rest: float = 1.0
    rest_noise: float = 0.0


_NEUTRAL = Calibration()


class Successors(NamedTuple):
    """What may follow a context.

    Attributes:
        token_ids: the most probable first.
        weights: theirs without the sequence and the noise, see `Calibration`.
        rest: the weight of all other tokens together, likewise.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    rest: float


@dataclass(frozen=True)
class TableEntries:
    """What a table holds, in any order of contexts.

    Attributes:
        context_hashes: uint64[contexts], each once.
        ends: int64[contexts], where each context's tokens end in the arrays below; they begin where the last one's end.
        token_ids: integers[tokens], the most probable of each context first.
        log_probs: float[tokens], natural logarithms.
    """

    context_hashes: UInt64Array
    ends: npt.NDArray[np.int64]
    token_ids: npt.NDArray[Any]
    log_probs: npt.NDArray[np.floating[Any]]


def bytes_per_token(vocab_size: int) -> int:
    """Room that a token after a context takes in a file."""
    return 1 + np.min_scalar_type(vocab_size - 1).itemsize


def write_table(
    path: Path,
    identity: TableIdentity,
    max_order: int,
    entries: TableEntries,
    calibration: Calibration = _NEUTRAL,
) -> None:
    """Write a table of contexts of up to `max_order` tokens."""
    num_buckets = len(entries.context_hashes) // _CONTEXTS_PER_BUCKET + 1
    buckets = (entries.context_hashes >> np.uint64(32)) * np.uint64(num_buckets) >> np.uint64(32)
    order = np.argsort(buckets, kind="stable")
    lengths = np.diff(entries.ends, prepend=0)
    begins = entries.ends - lengths
    lengths, begins = lengths[order], begins[order]
    ends = np.cumsum(lengths)
    moved = np.arange(len(entries.token_ids)) + np.repeat(begins - (ends - lengths), lengths)
    first_context = np.searchsorted(buckets[order], np.arange(num_buckets + 1, dtype=np.uint64))
    steps = np.rint(-entries.log_probs[moved] * _STEPS_PER_NAT)
    write_arrays(
        path,
        [
            ("kind", _KIND),
            ("tokenizer_hash", identity.tokenizer_hash),
            ("vocab_size", identity.vocab_size),
            ("max_order", max_order),
            ("calibration", np.array(astuple(calibration))),
            ("first_context", first_context.astype(np.uint32)),
            ("first_token", np.append(0, ends)[first_context].astype(np.uint32)),
            ("fingerprints", entries.context_hashes[order].astype(np.uint16)),
            ("lengths", lengths.astype(np.uint8)),
            ("token_ids", entries.token_ids[moved].astype(np.min_scalar_type(identity.vocab_size - 1))),
            ("log_probs", np.clip(steps, 0, len(_LOG_PROBS) - 1).astype(np.uint8)),
        ],
    )


class NgramTable:
    """A table of a file. It looks through memory views: one number out of them costs a tenth of what numpy's do.

    Attributes:
        arrays: the file's, by name (`write_table`).
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.arrays: Mapping[str, npt.NDArray[Any]] = {k: v for k, v in items.items() if isinstance(v, np.ndarray)}
        self.identity = TableIdentity(items["tokenizer_hash"], items["vocab_size"])
        self.max_order: int = items["max_order"]
        self.calibration = Calibration(*items["calibration"].tolist())
        self._num_buckets = len(items["first_context"]) - 1
        self._first_context = memoryview(items["first_context"])
        self._first_token = memoryview(items["first_token"])
        self._fingerprints = memoryview(items["fingerprints"])
        self._lengths = memoryview(items["lengths"])
        self._token_ids = memoryview(items["token_ids"])
        self._log_probs = memoryview(items["log_probs"])
        self._powers = [math.exp(self.calibration.exponent * log_prob) for log_prob in _LOG_PROBS]
        self.successors = lru_cache(_CACHED_CONTEXTS)(self._successors)

    @classmethod
    def open(cls, path: Path, identity: TableIdentity, cache_dir: Path) -> NgramTable:
        """Map a file.

        Args:
            identity: the target's.
            cache_dir: where the file's hash is remembered.

        Raises:
            InvalidArgumentError: if it cannot be read, is damaged, is something else, or was made for another target.
        """
        table = read_drafter(path, _KIND, cls, cache_dir)
        if table.identity != identity:
            raise InvalidArgumentError(FOLDER_FIELD, f"{path} was made for another tokenizer than the target's")
        return table

    def __len__(self) -> int:
        return len(self._fingerprints)

    def _successors(self, latest_first: tuple[int, ...]) -> Successors:
        """What follows the longest known beginning of a context, given from its latest token backwards."""
        hashes = [EMPTY_CONTEXT]
        for token_id in latest_first[: self.max_order]:
            hashes.append(longer_context(hashes[-1], token_id))
        while hashes:
            found = self._find(hashes.pop())
            if found is not None:
                steps = self._log_probs[found].tolist()
                remainder = max(_LEAST_REMAINDER, 1.0 - sum([_PROBABILITIES[step] for step in steps]))
                rest = self.calibration.rest * remainder**self.calibration.exponent
                powers = self._powers
                weights = tuple([powers[step] for step in steps])
                return Successors(tuple(self._token_ids[found].tolist()), weights, rest)
        return Successors((), (), 1.0)

    def _find(self, context_hash: int) -> slice | None:
        """Where the tokens that follow a context are."""
        bucket = (context_hash >> 32) * self._num_buckets >> 32
        first, last = self._first_context[bucket], self._first_context[bucket + 1]
        fingerprints = self._fingerprints[first:last].tolist()
        fingerprint = context_hash & 0xFFFF
        if fingerprint not in fingerprints:
            return None
        context = first + fingerprints.index(fingerprint)
        begin = self._first_token[bucket] + sum(self._lengths[first:context])
        return slice(begin, begin + self._lengths[context])
