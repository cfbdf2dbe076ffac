"""Makes one tree of what several sources drafted, by how likely each node is to come true given all that they say.

Below each node that some source expands, a logistic model says how likely each proposed child is to be emitted if the
node is. There is a model for each set of sources that expand a node, because a source without an opinion tells nothing
and one that spread its probability over other tokens tells a lot. Its features, for each source of the set: the
log-odds that the source claims for the child and the child's rank, or that it did not propose it; and how often the
source was right in this sequence. The models learn from every committed token, for all sequences together.

Their log-odds are weighted sums, as in Mattern's and Mahoney's mixing of models for compression: what they say is
calibrated, which a weighted sum of probabilities is not even if each of them is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import TypeAlias

from treeserve_core.tree import TokenTree
from treeserve_speculator.calibration import RANK_CLASSES, OnlineLogistic, log_odds, probability

# Features of a node, and for each source of the set from an offset on. What a source says of a child is either a claim
# (odds, one of the ranks, for its first child trust) or silence (silent, trust in silence).
_BIAS, _FIRST_LEVEL, _DEEP, _COMMON = 0, 1, 2, 3
_ODDS, _RANK = 0, 1
_TRUST, _SILENT, _SILENT_TRUST, _PER_SOURCE = (_RANK + RANK_CLASSES + i for i in range(4))
_DEEP_FROM = 4
# Prior weights. Sources agree more often by looking at the same thing than by chance: two claims count less than twice.
_PRIOR_BIAS, _PRIOR_ODDS, _PRIOR_TRUST, _PRIOR_SILENT = -0.2, 0.8, 1.0, -1.0
# Trust follows the last ten or so visits; what is claimed counts for less than it says.
_TRUST_GAIN, _TRUST_DECAY, _CLAIM_SLOPE = 0.25, 0.1, 0.7


@dataclass(frozen=True)
class MixBounds:
    """Bounds of a mixed tree.

    Attributes:
        max_nodes: the root not counted.
        max_depth: deepest node.
        least: least path probability of a node: below, it costs more than it brings.
    """

    max_nodes: int
    max_depth: int
    least: float = 0.0


class Opinion:
    """One source's tree for one root, with what mixing needs of it."""

    __slots__ = ("children", "mask", "odds", "token_ids")

    def __init__(self, tree: TokenTree) -> None:
        self.mask = tree.source_masks[-1] if tree.source_masks is not None else 0
        self.children = tree.children
        self.token_ids = tree.token_ids
        self.odds = list(map(log_odds, tree.log_probs or (0.0,) * len(tree)))


# Where sources are in their trees at one node of the mixed tree.
_Places: TypeAlias = Sequence[tuple[Opinion, int]]
# A source proposes a token as this child of its node, the so-manyth.
_Claim: TypeAlias = tuple[Opinion, int, int]


@dataclass(eq=False)
class _Followed:
    """Trees that were mixed, followed along committed tokens.

    Attributes:
        places: where these have led in them.
        depth: of that place.
        is_greedy: whether the target takes its most probable token.
    """

    places: _Places = ()
    depth: int = 0
    is_greedy: bool = True


@dataclass(eq=False)
class MixedSequence:
    """What a mixture keeps of one sequence.

    Attributes:
        trust: for each source (by its mask) how much more often its first children were right here than it said.
        latest: the sequence's latest trees.
    """

    trust: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    latest: _Followed = field(default_factory=lambda: _Followed())

    def forget(self) -> None:
        """There are no latest trees."""
        self.latest = _Followed()

    def see(self, mask: int, odds: float, *, was_right: bool) -> None:
        """A source's first child was right or not, for which it claimed these log-odds."""
        surprise = was_right - probability(_CLAIM_SLOPE * odds)
        self.trust[mask] += _TRUST_GAIN * surprise - _TRUST_DECAY * self.trust[mask]


class _Children:
    """What the sources say below one node: who expands it, and for each token who proposes it, as which child."""

    __slots__ = ("claims", "masks")

    def __init__(self, places: _Places) -> None:
        masks: list[int] = []
        claims: dict[int, list[_Claim]] = {}
        for opinion, node in places:
            children = opinion.children[node]
            if children:
                masks.append(opinion.mask)
                token_ids = opinion.token_ids
                for rank, child in enumerate(children):
                    token_id = token_ids[child]
                    if token_id in claims:
                        claims[token_id].append((opinion, child, rank))
                    else:
                        claims[token_id] = [(opinion, child, rank)]
        self.masks = tuple(masks)
        self.claims = claims

    def places_below(self, token_id: int) -> _Places:
        return [(opinion, child) for opinion, child, _ in self.claims.get(token_id, ())]


class Mixture:
    """The models, shared by all sequences of a drafter. Not thread-safe."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._models: dict[tuple[bool, tuple[int, ...]], OnlineLogistic] = {}

    def mix(
        self, sequence: MixedSequence, trees: Sequence[TokenTree], bounds: MixBounds, *, is_greedy: bool
    ) -> TokenTree:
        """The most likely nodes of all trees, as a tree whose log-probabilities are this mixture's.

        Args:
            trees: at least one, over the same root, without draws; each with its source's mask on all nodes.
            is_greedy: whether the target takes its most probable token: what sources claim means something else if not.
        """
        opinions = sorted([Opinion(tree) for tree in trees if len(tree) > 1], key=attrgetter("mask"))
        sequence.latest = _Followed([(opinion, 0) for opinion in opinions], 0, is_greedy)
        terms = _Terms(self, sequence)
        token_ids, parents, log_probs, masks = [trees[0].token_ids[0]], [-1], [0.0], [0]
        # (-path probability, depth, order, parent, token, probability, who proposes it)
        heap: list[tuple[float, int, int, int, int, float, _Places]] = []
        order, node, path, depth, places = 0, 0, 1.0, 0, sequence.latest.places
        while True:
            if depth < bounds.max_depth and (node == 0 or token_ids[node] not in self._eos_token_ids):
                least = bounds.least / path
                for token_id, p, below in terms.rated(places, depth + 1):
                    if p >= least:
                        order += 1
                        heappush(heap, (-path * p, depth + 1, order, node, token_id, p, below))
            if not heap or len(token_ids) > bounds.max_nodes:
                break
            negative, depth, _, parent, token_id, p, places = heappop(heap)
            path, node = -negative, len(token_ids)
            token_ids.append(token_id)
            parents.append(parent)
            log_probs.append(math.log(p))
            masks.append(sum([opinion.mask for opinion, _ in places]))
        return TokenTree.sound(tuple(token_ids), tuple(parents), tuple(log_probs), tuple(masks))

    def lesson(self, sequence: MixedSequence, new_tokens: Iterable[int]) -> Callable[[], None]:
        """Tokens were committed: what follows the sequence's latest trees along them and learns on the way, later."""
        return partial(self._follow, sequence, sequence.latest, new_tokens)

    def _follow(self, sequence: MixedSequence, latest: _Followed, new_tokens: Iterable[int]) -> None:
        for token_id in new_tokens:
            children = _Children(latest.places)
            latest.depth += 1
            if not children.masks:
                latest.places = ()
                return
            self._learn(sequence, latest, children, token_id)
            latest.places = children.places_below(token_id)

    def _learn(self, sequence: MixedSequence, latest: _Followed, children: _Children, token_id: int) -> None:
        model = self.model(latest.is_greedy, children.masks)
        observations = []
        for candidate, claims in children.claims.items():
            features = _features(sequence, children.masks, claims, latest.depth)
            p = probability(sum([model.weights[i] * x for i, x in features.items()]))
            observations.append((features, p, candidate == token_id))
        model.learn(observations)
        for opinion, node in latest.places:
            if opinion.children[node]:
                first = opinion.children[node][0]
                sequence.see(opinion.mask, opinion.odds[first], was_right=opinion.token_ids[first] == token_id)

    def model(self, is_greedy: bool, masks: tuple[int, ...]) -> OnlineLogistic:
        """The model for nodes that these sources expand."""
        model = self._models.get((is_greedy, masks))
        if model is None:
            of_source = [0.0] * _PER_SOURCE
            of_source[_ODDS], of_source[_TRUST] = _PRIOR_ODDS / math.sqrt(len(masks)), _PRIOR_TRUST
            of_source[_SILENT] = _PRIOR_SILENT
            model = OnlineLogistic([_PRIOR_BIAS, 0.0, 0.0, *(of_source * len(masks))])
            self._models[is_greedy, masks] = model
        return model


def _features(
    sequence: MixedSequence, masks: tuple[int, ...], claims: Sequence[_Claim], depth: int
) -> dict[int, float]:
    """What a model is told of one proposed child: see the offsets above."""
    features = {_BIAS: 1.0}
    if depth == 1:
        features[_FIRST_LEVEL] = 1.0
    elif depth >= _DEEP_FROM:
        features[_DEEP] = 1.0
    said = {opinion.mask: (opinion.odds[child], rank) for opinion, child, rank in claims}
    for at, mask in enumerate(masks):
        offset = _COMMON + at * _PER_SOURCE
        if mask in said:
            odds, rank = said[mask]
            features[offset + _ODDS] = odds
            features[offset + _RANK + min(rank, RANK_CLASSES - 1)] = 1.0
            if rank == 0:
                features[offset + _TRUST] = sequence.trust[mask]
        else:
            features[offset + _SILENT] = 1.0
            features[offset + _SILENT_TRUST] = sequence.trust[mask]
    return features


class _Terms:
    """The models' terms for one sequence at one root, summed up as far as they are the same for many nodes."""

    def __init__(self, mixture: Mixture, sequence: MixedSequence) -> None:
        self._mixture = mixture
        self._sequence = sequence
        # For each set of sources: what all being silent is worth by depth; for each source its slope, and by rank what
        # a claim is worth instead of silence.
        self._terms: dict[tuple[int, ...], tuple[list[float], dict[int, tuple[float, list[float]]]]] = {}

    def rated(self, places: _Places, depth: int) -> list[tuple[int, float, _Places]]:
        """Each token proposed below a node, its probability and who proposes it; probabilities sum to at most 1."""
        expanded = [(opinion, opinion.children[node]) for opinion, node in places if opinion.children[node]]
        if not expanded:
            return []
        masks = tuple([opinion.mask for opinion, _ in expanded])
        terms = self._terms.get(masks)
        if terms is None:
            terms = self._terms[masks] = self._sum_up(masks)
        silence, of_source = terms[0][min(depth, _DEEP_FROM)], terms[1]
        proposers: dict[int, list[tuple[Opinion, int]]] = {}
        odds: dict[int, float] = {}
        for opinion, children in expanded:
            slope, instead = of_source[opinion.mask]
            for rank, child in enumerate(children):
                token_id = opinion.token_ids[child]
                said = slope * opinion.odds[child] + instead[rank if rank < RANK_CLASSES else -1]
                if token_id in proposers:
                    proposers[token_id].append((opinion, child))
                    odds[token_id] += said
                else:
                    proposers[token_id] = [(opinion, child)]
                    odds[token_id] = silence + said
        chances = list(map(probability, odds.values()))
        total = max(1.0, sum(chances))
        return [(token_id, p / total, proposers[token_id]) for token_id, p in zip(odds, chances, strict=True)]

    def _sum_up(self, masks: tuple[int, ...]) -> tuple[list[float], dict[int, tuple[float, list[float]]]]:
        w, trust = self._mixture.model(self._sequence.latest.is_greedy, masks).weights, self._sequence.trust
        silence = w[_BIAS]
        of_source: dict[int, tuple[float, list[float]]] = {}
        for at, mask in enumerate(masks):
            own = w[_COMMON + at * _PER_SOURCE : _COMMON + (at + 1) * _PER_SOURCE]
            silent = own[_SILENT] + own[_SILENT_TRUST] * trust[mask]
            instead = [value - silent for value in own[_RANK : _RANK + RANK_CLASSES]]
            instead[0] += own[_TRUST] * trust[mask]
            silence += silent
            of_source[mask] = own[_ODDS], instead
        by_depth = [silence] * (_DEEP_FROM + 1)
        by_depth[1] += w[_FIRST_LEVEL]
        by_depth[_DEEP_FROM] += w[_DEEP]
        return by_depth, of_source
