"""Texts in place of a model's: which token comes next, and how well a drafter foresees it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from treeserve_core.identity import ModelIdentity
from treeserve_core.tree import TokenTree

VOCAB_SIZE = 49_152
EOS = 2
IDENTITY = ModelIdentity("simulated", "", VOCAB_SIZE, VOCAB_SIZE, (EOS,))
_FIRST_ID = 16  # no text contains a special token
_MOST_RANKS = 8
_BEYOND = 64  # tokens a drafter may look past the end
_SURE = 0.999

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TextKind:
    """How well drafters foresee a kind of text.

    A text alternates between stretches that can be foreseen (copied or boilerplate) and stretches that hardly can. The
    drafters' claims lean on what is true, but not exactly: they are too sure of themselves, and noisy.

    Attributes:
        easy_share: share of the text that is in foreseeable stretches.
        stretch: tokens of a stretch.
        easy_hit, hard_hit: chance that the drafters' first choice is the target's token, in and out of them.
        next_hit: chance that the choice after a wrong one is, each time.
        sureness: by how much claims exaggerate: 1 is calibrated, above it too sure.
        noise: standard deviation of a claim's log-odds.
    """

    easy_share: float
    easy_hit: float
    hard_hit: float
    stretch: int = 12
    next_hit: float = 0.25
    sureness: float = 1.2
    noise: float = 0.7

    def shifted(self, log_odds: float) -> TextKind:
        """The kind with its first choices' odds multiplied by exp(log_odds)."""
        return replace(self, easy_hit=_shift(self.easy_hit, log_odds), hard_hit=_shift(self.hard_hit, log_odds))


KINDS: Mapping[str, TextKind] = MappingProxyType(
    {
        "": TextKind(0.35, 0.85, 0.40),
        "chat": TextKind(0.30, 0.85, 0.42),
        "story": TextKind(0.25, 0.85, 0.40),
        "code": TextKind(0.40, 0.88, 0.42),
        "summary": TextKind(0.50, 0.85, 0.30),
        "rewrite": TextKind(0.70, 0.90, 0.30),
        "extraction": TextKind(0.70, 0.90, 0.28),
    }
)


class Text:
    """One conversation, prompt and output: every token of it, decided beforehand.

    Equal keys give equal texts, and a longer one begins with the shorter: a later turn finds the earlier turns in its
    prompt, and whoever computes a token computes the same.

    Args:
        key: of the conversation.
        length: tokens of it that may be asked for.
        first_drafted: drafters look at nothing before it.
    """

    def __init__(self, key: int, kind: TextKind, length: int, first_drafted: int) -> None:
        self.token_ids: list[int] = (
            _FIRST_ID + (_uniform(key, 0, np.arange(length + _BEYOND)) * (VOCAB_SIZE - _FIRST_ID)).astype(np.int64)
        ).tolist()
        drafted = np.arange(first_drafted, length + _BEYOND)
        easy = _uniform(key, 1, drafted // kind.stretch) < kind.easy_share
        hit = np.where(easy, kind.easy_hit, kind.hard_hit)
        self._first = first_drafted
        self._ranks: list[int] = _true_ranks(_uniform(key, 2, drafted), hit, kind.next_hit).tolist()
        normal = np.sqrt(-2.0 * np.log(_uniform(key, 3, drafted))) * np.cos(2 * np.pi * _uniform(key, 4, drafted))
        claims = 1.0 / (1.0 + np.exp(-(kind.sureness * _log_odds(hit) + kind.noise * normal)))
        self._claims: list[float] = np.minimum(claims, _SURE).tolist()
        self._next_hit = kind.next_hit

    def tree(self, base: int, max_nodes: int, max_depth: int) -> TokenTree:
        """What drafters propose after the first `base` tokens: the most probable paths, as they see it.

        A node off the text is continued as plausibly as one on it: drafters cannot tell.
        """
        token_ids, parents, log_probs = [self.token_ids[base - 1]], [-1], [0.0]
        depths, truths = [0], [True]
        heap: list[tuple[float, int, int]] = []  # -path log-probability, parent, rank
        paths = [0.0]
        self._offer(heap, paths[0], 0, 1, base)
        while heap and len(token_ids) <= max_nodes:
            negative, parent, rank = heapq.heappop(heap)
            place = base + depths[parent]
            is_true = truths[parent] and self._ranks[place - self._first] == rank
            truth = self.token_ids[place]
            node = len(token_ids)
            # Siblings differ: the multiples of a prime do, modulo the vocabulary.
            wrong = _FIRST_ID + (truth - _FIRST_ID + 7919 * rank) % (VOCAB_SIZE - _FIRST_ID)
            token_ids.append(truth if is_true else wrong)
            parents.append(parent)
            paths.append(-negative)
            log_probs.append(min(0.0, paths[node] - paths[parent]))
            depths.append(depths[parent] + 1)
            truths.append(is_true)
            if rank < _MOST_RANKS:
                self._offer(heap, paths[parent], parent, rank + 1, place)
            if depths[node] < max_depth:
                self._offer(heap, paths[node], node, 1, place + 1)
        return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))

    def _offer(self, heap: list[tuple[float, int, int]], above: float, parent: int, rank: int, place: int) -> None:
        if place - self._first >= len(self._claims):
            return
        claim = self._claims[place - self._first]
        if rank > 1:
            claim = (1.0 - claim) * self._next_hit * (1.0 - self._next_hit) ** (rank - 2)
        heapq.heappush(heap, (-(above + math.log(claim)), parent, rank))


def _true_ranks(uniform: Floats, hit: Floats, next_hit: float) -> npt.NDArray[np.int64]:
    """Place of the target's token among the drafters' choices, from 1: geometric after the first."""
    rest = np.clip((uniform - hit) / (1.0 - hit), 0.0, 1.0 - 1e-12)
    return np.where(uniform < hit, 1, 2 + np.floor(np.log1p(-rest) / math.log1p(-next_hit))).astype(np.int64)


def _uniform(key: int, stream: int, counters: npt.NDArray[np.int64]) -> Floats:
    """Numbers in (0, 1), each a function of key, stream and counter alone (the finaliser of splitmix64)."""
    x = counters.astype(np.uint64) + np.uint64((key * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53


def _log_odds(probability: Floats) -> Floats:
    return np.log(probability / (1.0 - probability))


def _shift(probability: float, log_odds: float) -> float:
    odds = probability / (1.0 - probability) * math.exp(log_odds)
    return odds / (1.0 + odds)
