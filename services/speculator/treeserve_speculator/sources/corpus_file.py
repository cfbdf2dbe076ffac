"""A corpus file: an operator's texts as token ids, indexed by what comes before each token. Mapped read-only.

The index is a suffix array of the text read backwards: all places, sorted by the tokens before them, the nearest first,
as far as `depth`. So the places where a context occurred lie side by side, and a context that is one token longer has
its places among those of the shorter one: a binary search each.

| name | content |
|---|---|
| format | FORMAT |
| tokenizer_hash, vocab_size | of the tokenizer that made the ids |
| depth | tokens of context the places are sorted by |
| tokens | uint16 or uint32[n]: documents, each between two separators; a separator is the id vocab_size |
| places | uint32[m]: positions in `tokens` of all tokens that have one before them in their document, sorted |
| starts | uint32[vocab_size + 1]: where in `places` the contexts that end with each token begin |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.array_file import FOOTER_BYTES, DamagedFileError, map_arrays, write_arrays
from treeserve_engine.made_once import content_hash

FORMAT = "treeserve corpus 1"


@dataclass(frozen=True, eq=False)
class CorpusIndex:
    """What a corpus file holds; see there."""

    tokenizer_hash: str
    vocab_size: int
    depth: int
    tokens: npt.NDArray[Any]
    places: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.uint32]


def write_corpus(path: Path, index: CorpusIndex) -> None:
    """Write a file. It appears under its name when it is complete: one that is mapped must never be written to."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    names = ("tokenizer_hash", "vocab_size", "depth", "tokens", "places", "starts")
    try:
        write_arrays(unfinished, [("format", FORMAT), *((name, getattr(index, name)) for name in names)])
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def open_corpus(path: Path, tokenizer_hash: str, memory: Path) -> Corpus:
    """Map a file.

    Args:
        tokenizer_hash: of the target's tokenizer.
        memory: folder where it is remembered that the file's checksum was right.

    Raises:
        InvalidArgumentError: if it cannot be read, is damaged, or was built for another tokenizer.
    """
    try:
        content = map_arrays(path, partial(content_hash, memory=memory, skip_last=FOOTER_BYTES))
    except (OSError, DamagedFileError) as error:
        raise InvalidArgumentError("corpus", f"{path} cannot be used: {error}") from error
    if content.get("format") != FORMAT:
        raise InvalidArgumentError("corpus", f"{path} is not a corpus of this version: build it anew")
    if content["tokenizer_hash"] != tokenizer_hash:
        raise InvalidArgumentError("corpus", f"{path} was built for another tokenizer than the target's")
    return Corpus(CorpusIndex(**{name: value for name, value in content.items() if name != "format"}))


class Corpus:
    """Finds where a context occurred.

    Attributes:
        tokens: all token ids; a separator follows each document.
        places: positions in `tokens`, in the order of the file.
        separator: the id between documents.
    """

    def __init__(self, index: CorpusIndex) -> None:
        # An element of a memoryview is a plain int, three times as fast as an array's.
        self.tokens = index.tokens.data
        self.places = index.places.data
        self.separator = index.vocab_size
        self._starts = index.starts.data
        self._depth = index.depth

    def longest(self, context: Sequence[int]) -> tuple[int, range]:
        """The longest end of a context that occurred: how many tokens that is, and where in `places` they did."""
        tokens, places = self.tokens, self.places
        found = range(self._starts[context[-1]], self._starts[context[-1] + 1])
        if not found:
            return 0, found
        for length in range(1, min(len(context), self._depth)):
            before = partial(_token_before, tokens, length + 1)
            first = bisect_left(places, context[-1 - length], found.start, found.stop, key=before)
            last = bisect_right(places, context[-1 - length], first, found.stop, key=before)
            if first == last:
                return length, found
            found = range(first, last)
        return min(len(context), self._depth), found


def _token_before(tokens: Sequence[int], offset: int, place: int) -> int:
    return tokens[place - offset]
