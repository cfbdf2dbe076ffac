"""Builds n-gram tables: what the target holds probable after a few tokens, from its own recorded outputs.

For every context of up to `max_order` tokens the target's distributions there are averaged, and mixed with the mixture
for the context without its farthest token: N observations weigh as much as N / (N + concentration). What is stored of a
context is the mixture's most probable tokens, so that one look-up of the longest known context answers. Contexts
compete for the room in the file by the information they add per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_speculator.sources.ngram_table_file import (
    BYTES_PER_CONTEXT,
    EMPTY_CONTEXT,
    FILE_OVERHEAD,
    MAX_SUCCESSORS,
    NgramTable,
    TableEntries,
    TableIdentity,
    UInt64Array,
    bytes_per_token,
    longer_contexts,
    write_table,
)
from treeserve_training.ngram_calibration import calibrate
from treeserve_training.probability_lists import FloatArray, IntArray, Lists, looked_up, summed
from treeserve_training.records import Sample, read_about, read_samples

# Less than this of a distribution is left out: it would double the work, and no tree has room for it.
_LEAST_PROBABILITY = 0.002
_GROUPS_AT_ONCE = 250_000


@dataclass(frozen=True)
class NgramTableOptions:
    """How a table is made.

    Attributes:
        max_bytes: of the file.
        max_order: tokens of the longest contexts.
        concentration: observations that a context needs to weigh as much as the shorter one.
        max_successors: most tokens stored of one context.
        least_probability: of a stored token.
        least_uses: expected observations of a stored token; rare contexts get short lists.
        discount: taken off each context's number of observations when it is asked how useful it will be.

    Raises:
        InvalidArgumentError: if no file can hold lists of that length.
    """

    max_bytes: int = 12_000_000
    max_order: int = 4
    concentration: float = 3.0
    max_successors: int = 40
    least_probability: float = 0.003
    least_uses: float = 0.03
    discount: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.max_successors <= MAX_SUCCESSORS:
            raise InvalidArgumentError("max_successors", f"{self.max_successors} is outside [1, {MAX_SUCCESSORS}]")


@dataclass(frozen=True)
class NgramTableReport:
    """What became of a build: recorded output tokens, contexts seen and kept, tokens stored, size of the file."""

    observations: int
    contexts_seen: int
    contexts: int
    successors: int
    file_bytes: int


@dataclass(frozen=True)
class _Observations:
    """All recorded positions, one after the other.

    Attributes:
        token_ids: uint64[tokens], all samples' prompts and outputs.
        at: int64[n], index in `token_ids` of each output token.
        known: int64[n], tokens of its own sample before it.
        top_ids: uint16 or uint32[n, 8].
        top_probabilities: float32[n, 8].
    """

    token_ids: UInt64Array
    at: IntArray
    known: IntArray
    top_ids: npt.NDArray[Any]
    top_probabilities: FloatArray

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> _Observations:
        """Those of some samples.

        Raises:
            InvalidArgumentError: if there is none.
        """
        tokens, at, known, ids, log_probs = [], [], [], [], []
        total = 0
        for sample in samples:
            prompt_len, output_len = len(sample.prompt_ids), len(sample.output_ids)
            tokens.append(np.array(sample.prompt_ids + sample.output_ids, np.uint64))
            known.append(np.arange(prompt_len, prompt_len + output_len))
            at.append(total + known[-1])
            ids.append(sample.top_ids)
            log_probs.append(sample.top_log_probs)
            total += prompt_len + output_len
        if not tokens:
            raise InvalidArgumentError("data", "there is nothing in it to train with")
        return cls(
            np.concatenate(tokens),
            np.concatenate(at),
            np.concatenate(known),
            np.concatenate(ids),
            np.exp(np.concatenate(log_probs).astype(np.float32)),
        )


@dataclass(frozen=True)
class _Level:
    """All contexts of one order.

    Attributes:
        hashes: uint64[contexts], ascending.
        lists: what follows, the most probable first.
        usefulness: float64[contexts], nats that the list tells beyond the shorter context's, times observations.
    """

    hashes: UInt64Array
    lists: Lists
    usefulness: npt.NDArray[np.float64]


def build_ngram_table(
    data: Path,
    out: Path,
    options: NgramTableOptions | None = None,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> NgramTableReport:
    """Make a table of a data folder's training split and calibrate it on the validation split.

    Args:
        out: the file to write; it appears when it is complete.
        progress: told what happens, one line at a time.

    Raises:
        InvalidArgumentError: if the folder holds no data.
    """
    options = options or NgramTableOptions()
    about = read_about(data)
    identity = TableIdentity(str(about["tokenizer"]), int(about["vocab_size"]))
    observations = _Observations.of(read_samples(data, split="train"))
    progress(f"{len(observations.at)} recorded tokens")
    levels = list(_levels(observations, identity.vocab_size, options, progress))
    entries = _selected(levels, identity.vocab_size, options.max_bytes)
    unfinished = out.with_name(f".{out.name}.unfinished")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_table(unfinished, identity, options.max_order, entries)
    calibration = calibrate(NgramTable.open(unfinished, identity, out.parent), read_samples(data, split="validation"))
    progress(f"{calibration}")
    write_table(unfinished, identity, options.max_order, entries, calibration)
    unfinished.replace(out)
    return NgramTableReport(
        observations=len(observations.at),
        contexts_seen=sum(len(level.hashes) for level in levels),
        contexts=len(entries.context_hashes),
        successors=len(entries.token_ids),
        file_bytes=out.stat().st_size,
    )


def _levels(
    observations: _Observations, vocab_size: int, options: NgramTableOptions, progress: Callable[[str], None]
) -> Iterator[_Level]:
    """The contexts of each order, from that of no tokens on."""
    hashes = np.full(len(observations.at), EMPTY_CONTEXT, np.uint64)
    shorter: _Level | None = None
    for order in range(options.max_order + 1):
        shorter_hashes = hashes
        if order:
            hashes = longer_contexts(hashes, observations.token_ids[np.maximum(observations.at - order, 0)])
        whole = np.flatnonzero(observations.known >= order)
        if not len(whole):
            return
        unique, first, group, counts = np.unique(
            hashes[whole], return_index=True, return_inverse=True, return_counts=True
        )
        average = _average(observations, whole, group, counts, vocab_size)
        if shorter is None:
            lists = _shortened(average.most_probable(options.max_successors), counts, options)
            usefulness = np.full(1, np.inf)
        else:
            parents = np.searchsorted(shorter.hashes, shorter_hashes[whole[first]])
            lists, usefulness = _mixed(average, counts, shorter.lists, parents, vocab_size, options)
        shorter = _Level(unique, lists, usefulness)
        progress(f"{len(unique)} contexts of {order} tokens")
        yield shorter


def _average(observations: _Observations, rows: IntArray, group: IntArray, counts: IntArray, vocab_size: int) -> Lists:
    """The mean distribution of each group of observations, its tokens ascending."""
    probabilities = observations.top_probabilities[rows]
    counted = probabilities >= _LEAST_PROBABILITY
    keys = (group[:, None] * vocab_size + observations.top_ids[rows])[counted]
    keys, sums = summed(keys, probabilities[counted])
    groups = keys // vocab_size
    ends = np.searchsorted(groups, np.arange(len(counts)), side="right")
    return Lists(ends, (keys % vocab_size).astype(np.int32), (sums / counts[groups]).astype(np.float32))


def _mixed(
    average: Lists,
    counts: IntArray,
    shorter: Lists,
    parents: IntArray,
    vocab_size: int,
    options: NgramTableOptions,
) -> tuple[Lists, npt.NDArray[np.float64]]:
    """Each context's own average mixed with its parent's list, and its usefulness; some groups at a time."""
    parts, usefulness = [], []
    own_share = (counts / (counts + options.concentration)).astype(np.float32)
    for start in range(0, len(counts), _GROUPS_AT_ONCE):
        groups = np.arange(start, min(start + _GROUPS_AT_ONCE, len(counts)))
        own_place, own_at = average.of(groups)
        parent_place, parent_at = shorter.of(parents[groups])
        own_keys = own_place * vocab_size + average.token_ids[own_at]
        parent_keys = parent_place * vocab_size + shorter.token_ids[parent_at]
        own = average.probabilities[own_at] * own_share[groups][own_place]
        inherited = shorter.probabilities[parent_at] * (1 - own_share[groups])[parent_place]
        keys, sums = summed(np.concatenate([own_keys, parent_keys]), np.concatenate([own, inherited]))
        ends = np.searchsorted(keys // vocab_size, np.arange(len(groups)), side="right")
        lists = Lists(ends, (keys % vocab_size).astype(np.int32), sums).most_probable(options.max_successors)
        wanted = lists.groups * vocab_size + lists.token_ids
        before = looked_up(wanted, parent_keys, shorter.probabilities[parent_at], _LEAST_PROBABILITY / 2)
        told = lists.probabilities * np.log(lists.probabilities / before)
        divergence = np.bincount(lists.groups, told, len(groups))
        usefulness.append((counts[groups] - options.discount) * divergence)
        parts.append(_shortened(lists, counts[groups], options))
    offsets = np.cumsum([0, *(len(part.token_ids) for part in parts[:-1])])
    joined = Lists(
        np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
    )
    return joined, np.concatenate(usefulness)


def _shortened(lists: Lists, counts: IntArray, options: NgramTableOptions) -> Lists:
    """Without the tokens that are too improbable or would hardly ever be used; each context keeps its first."""
    uses = np.maximum(counts - options.discount, options.discount / 2)
    least = np.maximum(options.least_probability, options.least_uses / uses).astype(np.float32)
    return lists.subset((lists.probabilities >= least[lists.groups]) | (lists.ranks == 0))


def _selected(levels: list[_Level], vocab_size: int, max_bytes: int) -> TableEntries:
    """The contexts that tell most per byte, as many as fit."""
    hashes = np.concatenate([level.hashes for level in levels])
    lengths = np.concatenate([level.lists.lengths for level in levels])
    size = BYTES_PER_CONTEXT + bytes_per_token(vocab_size) * lengths
    order = np.argsort(-np.concatenate([level.usefulness for level in levels]) / size)
    kept = np.sort(order[: np.searchsorted(np.cumsum(size[order]), max_bytes - FILE_OVERHEAD, side="right")])
    everything = Lists(
        np.cumsum(lengths),
        np.concatenate([level.lists.token_ids for level in levels]),
        np.concatenate([level.lists.probabilities for level in levels]),
    )
    _, at = everything.of(kept)
    return TableEntries(
        hashes[kept],
        np.cumsum(lengths[kept]),
        everything.token_ids[at],
        np.log(np.minimum(everything.probabilities[at], 1.0)),
    )
