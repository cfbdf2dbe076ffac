"""Builds a corpus file for the retrieval source: reads texts, tokenises them, sorts every place by what precedes it."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_speculator.sources.corpus_file import CorpusIndex, write_corpus
from treeserve_text.tokenizer import Tokenizer

DEPTH = 16
_JSON_LINES = (".jsonl", ".ndjson")
# Tokenised at a time: the tokenizer's own notes on a text take a hundred times its size.
_PIECE_CHARS = 1 << 18


@dataclass(frozen=True)
class CorpusSummary:
    """What a corpus was built of.

    Attributes:
        skipped: files that are no text.
    """

    documents: int
    tokens: int
    skipped: tuple[Path, ...]


def build_corpus(
    inputs: Sequence[Path], tokenizer: Tokenizer, out: Path, report: Callable[[str], None] = lambda line: None
) -> CorpusSummary:
    """Build a file of all texts in the inputs; equal texts count once.

    Args:
        inputs: files, and folders to look through. Of ``.jsonl`` files every string of a record is a text, of others
            the whole is one. What is no UTF-8 is skipped.
        report: told in one line how far it is.

    Raises:
        InvalidArgumentError: if an input does not exist, a line is no JSON, or there is nothing to index.
    """
    skipped: list[Path] = []
    tokens, documents = array("I", [tokenizer.vocab_size]), 0
    for text in _distinct(_texts(inputs, skipped)):
        for piece in _pieces(text):
            tokens.extend(tokenizer.encode(piece))
        tokens.append(tokenizer.vocab_size)
        documents += 1
        if documents % 1000 == 0:
            report(f"read {documents} texts, {len(tokens)} tokens")
    report(f"indexing {len(tokens)} tokens of {documents} texts")
    index = index_tokens(np.frombuffer(tokens, np.uint32), tokenizer.hash, tokenizer.vocab_size)
    if len(index.places) == 0:
        raise InvalidArgumentError("corpus", "the inputs hold no text")
    write_corpus(out, index)
    return CorpusSummary(documents, len(tokens) - documents - 1, tuple(skipped))


def index_tokens(
    tokens: npt.NDArray[np.uint32], tokenizer_hash: str, vocab_size: int, depth: int = DEPTH
) -> CorpusIndex:
    """Index documents.

    Sorting is by prefix doubling: ranks by the last 1, 2, 4, .. tokens, each from two ranks of the step before.

    Args:
        tokens: uint32[n], n < 2^32: separators (the id `vocab_size`) around each document.
    """
    ranks = tokens.astype(np.int64)
    length = 1
    while length < depth:
        keys = ranks * (int(ranks.max()) + 1)
        keys[length:] += ranks[:-length]  # before the first separator nothing matters
        ranks = _ranked(keys)
        length *= 2
    separator = vocab_size
    positions = 1 + np.flatnonzero((tokens[1:] != separator) & (tokens[:-1] != separator))
    # Ranks and positions fit one number; sorting numbers is ten times as fast as sorting indices.
    places = np.sort((ranks[positions - 1] << 32) | positions) & 0xFFFFFFFF
    counts = np.bincount(tokens[positions - 1], minlength=vocab_size)
    starts = np.concatenate([[0], np.cumsum(counts)])
    narrow = np.uint16 if vocab_size < 2**16 else np.uint32
    return CorpusIndex(
        tokenizer_hash, vocab_size, depth, tokens.astype(narrow), places.astype(np.uint32), starts.astype(np.uint32)
    )


def _ranked(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rank of each key among the distinct ones."""
    order = np.argsort(keys)
    ordered = keys[order]
    ranks = np.empty_like(keys)
    ranks[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
    return ranks


def _texts(inputs: Sequence[Path], skipped: list[Path]) -> Iterator[str]:
    for path in _files(inputs):
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            skipped.append(path)
            continue
        if path.suffix.lower() in _JSON_LINES:
            yield from _json_texts(path, content)
        else:
            yield content


def _files(inputs: Sequence[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_dir():
            inside = sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())
            yield from (path / p for p in inside if not any(part.startswith(".") for part in p.parts))
        elif path.is_file():
            yield path
        else:
            raise InvalidArgumentError("inputs", f"{path} does not exist")


def _json_texts(path: Path, content: str) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                yield from _strings(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise InvalidArgumentError("inputs", f"{path}, line {number} is no JSON") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end with a line, so that no word is cut apart unless a line is longer than a piece."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE_CHARS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
