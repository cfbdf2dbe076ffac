"""Retrieval (REST): follow what came after the present context in texts that the operator supplied.

After REST (He et al., 2024). The texts are a file that `treeserve corpus build` made; nothing of a request enters it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.corpus_file import Corpus, open_corpus
from treeserve_speculator.sources.counts import grow


class _Places:
    """Where a context ends in the corpus: positions of the next tokens (a `Context`)."""

    __slots__ = ("_corpus", "_positions")

    def __init__(self, corpus: Corpus, positions: Iterable[int]) -> None:
        self._corpus = corpus
        self._positions = positions

    def followers(self) -> list[tuple[int, int, _Places]]:
        """Each token that followed, how often, and where it did."""
        tokens, separator = self._corpus.tokens, self._corpus.separator
        below: dict[int, list[int]] = {}
        for position in self._positions:
            token_id = tokens[position]
            if token_id != separator:
                below.setdefault(token_id, []).append(position + 1)
        return [(token_id, len(places), _Places(self._corpus, places)) for token_id, places in below.items()]


class CorpusSource:
    """Grows a tree from what followed the longest context that occurred.

    Args:
        max_context: longest context looked up.
        max_places: occurrences looked at, evenly spread over all of them.
    """

    name = "corpus"
    wants_top_tokens = False

    def __init__(self, corpus: Corpus, max_context: int = 16, max_places: int = 64) -> None:
        self._corpus = corpus
        self._max_context = max_context
        self._max_places = max_places

    def open(self, state: DraftSequence) -> None:
        """Nothing to keep per sequence."""

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing is learnt from requests."""

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The likeliest continuations of the longest context; None if the last token does not occur."""
        length, occurrences = self._corpus.longest(state.tokens[-self._max_context :])
        if length == 0:
            return None
        return grow(self._spread(occurrences), length, state.tokens[-1], budget).tree()

    def close(self, state: DraftSequence) -> None:
        """Nothing was kept."""

    def _spread(self, occurrences: range) -> _Places:
        step = max(1, len(occurrences) / self._max_places)
        count = min(len(occurrences), self._max_places)
        places = self._corpus.places
        return _Places(self._corpus, [places[occurrences.start + int(i * step)] for i in range(count)])


def build(settings: SourceSettings) -> CorpusSource:
    """The source as configured. Raises InvalidArgumentError if the file cannot be used."""
    assert settings.config.corpus is not None  # the configuration was checked
    return CorpusSource(open_corpus(settings.config.corpus, settings.tokenizer_hash, settings.config.cache_dir))
