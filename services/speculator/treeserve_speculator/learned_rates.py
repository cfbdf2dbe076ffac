"""How often sources are right in one kind of text, and how far a tree is followed therefore."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treeserve_speculator.presets import DEPTHS, WIDTHS, DraftPreset

DEEPEST = DEPTHS[-1]
NUM_PROMISES = 5

_MEMORY = 400.0  # visits that count; older ones fade
_PRIOR_VISITS = 6.0
_FADING = 0.998
_HOPE = 0.7
_DRIFT = 0.02
_CURIOSITY = 0.5  # standard deviations
_KNOWN_PRIOR = (0.05, 0.35, 0.5, 0.65, 0.8)  # by promise
_PROMISES = (0.2, 0.6, 1.2, 2.5)
_DEEPER = 0.8  # beyond a preset's depth, so much of its probability: what easy text can make up for
_NARROWER = 0.85  # the same for a smaller width than the preset's
_SAMPLED = 0.8  # the same for tokens that are drawn
_SURE = 0.97

_FACTOR_PRIOR = 2.0
_FACTOR_KEPT = 0.95  # per visit
_FACTOR_RELAXES = 0.97  # per committed token
_FACTOR_BOUNDS = (0.1, 2.5)


class Rate:
    """How often something comes true, the newest sightings counting most; a prior counts as so many.

    Attributes:
        upper: what it may well be, given how little was seen: choosing by that tries what is not known.
    """

    __slots__ = ("_weight", "upper", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self._weight = _PRIOR_VISITS
        self._bound()

    def see(self, hit: bool) -> None:
        """One more sighting."""
        self._weight = min(self._weight + 1.0, _MEMORY)
        self.value += (hit - self.value) / self._weight
        self._bound()

    def drift(self, hope: float) -> None:
        """It might have come true, but was not tried for lack of hope: some hope comes back."""
        self.value += _DRIFT * (hope - self.value)
        self._bound()

    def fade(self) -> None:
        """It could have been tried and was not."""
        self._weight = max(_PRIOR_VISITS, _FADING * self._weight)
        self._bound()

    def _bound(self) -> None:
        self.upper = self.value + _CURIOSITY * math.sqrt(max(self.value * (1.0 - self.value), 0.04) / self._weight)


class Factor:
    """How much more often than usual sources are right in one sequence at present: recent hits over expected ones."""

    __slots__ = ("_expected", "_hits")

    def __init__(self) -> None:
        self._hits = self._expected = 0.0

    @property
    def value(self) -> float:
        """Near 1 while little was seen."""
        low, high = _FACTOR_BOUNDS
        return min(high, max(low, (_FACTOR_PRIOR + self._hits) / (_FACTOR_PRIOR + self._expected)))

    def see(self, hit: bool, expected: float) -> None:
        """A visit where a hit was that probable."""
        self._hits = _FACTOR_KEPT * self._hits + hit
        self._expected = _FACTOR_KEPT * self._expected + expected

    def relax(self, tokens: int) -> None:
        """Text went by: what was seen before says less about what comes."""
        left = _FACTOR_RELAXES**tokens
        self._hits *= left
        self._expected *= left


class SourceRates:
    """How often a costly source is right, by what the cheap ones promise, depth and width.

    Attributes:
        joins: by width, promise, and whether at the root or deeper: it has the token on a path that the cheap sources
            knew up to here, where they have not.
        goes_on: by width and depth: it has the next token on a path that is its own.
        deeper: the same of the nodes below the root that it expanded. It begins high: what is not tried is not learnt.
    """

    def __init__(self, preset: DraftPreset, source: str, sampled: bool) -> None:
        right = preset.right(source) * (_SAMPLED if sampled else 1.0)
        by_width = [right * (_NARROWER if width < preset.width else 1.0) for width in WIDTHS]
        self.joins = [[[Rate(p), Rate(p)] for _ in range(NUM_PROMISES)] for p in by_width]
        by_depth = [1.0 if depth <= preset.depth else _DEEPER for depth in range(DEEPEST + 1)]
        self.goes_on = [[Rate(p * share) for share in by_depth] for p in by_width]
        self.deeper = Rate(_HOPE)

    def rate(self, promise: int, depth: int, width: int, *, on_known: bool) -> Rate:
        """The rate of a visit: `width` is an index of WIDTHS, depth that of the token looked for."""
        if on_known:
            return self.joins[width][promise][depth > 1]
        return self.goes_on[width][depth]

    def see_deeper(self, *, expanded: bool, hit: bool) -> None:
        """A node of its own below the root was on the path: did it expand that, and did it have the next token?"""
        if expanded:
            self.deeper.see(hit)
        else:
            self.deeper.drift(_HOPE)

    def fade(self, promise: int) -> None:
        """The source was not asked."""
        for by_promise in self.joins:
            by_promise[promise][0].fade()

    def scaled(self, promise: int, width: int, factor: float, most: float = 1.0) -> tuple[list[float], list[float]]:
        """What joins (at the root, deeper) and goes_on (by depth) may be, each at most `most`, times a factor."""
        top = min(_SURE, most * factor)
        joins = [min(top, rate.upper * factor) for rate in self.joins[width][promise]]
        return joins, [min(top, rate.upper * factor) for rate in self.goes_on[width]]


class KindRates:
    """What is known of one kind of text: the cheap sources together, each costly one, and what several have in common.

    A committed path is *known* as long as cheap sources proposed its nodes, and *extra* below a node that only costly
    ones proposed. With K_j and X_j the probabilities that a path is followed to depth j on either,

        K_j = K_(j-1) known_j        X_j = (K_(j-1) - K_j) joins + X_(j-1) goes_on_j

    and the accepted tokens are the sum of both over all depths that are grown.
    """

    def __init__(self, preset: DraftPreset, sources: Sequence[str], sampled: bool) -> None:
        # The preset's width first: of equal ones it is taken.
        self.widths = tuple(sorted(range(len(WIDTHS)), key=lambda index: WIDTHS[index] != preset.width))
        self.known = [[Rate(p) for _ in range(DEEPEST + 1)] for p in _KNOWN_PRIOR]
        self.sources = {name: SourceRates(preset, name, sampled) for name in sources}
        # Of what another costly source lacks, a second one has less than of what the cheap ones lack.
        self.beyond = {(a, b): Rate(preset.right(a) / 3.0) for a in sources for b in sources if a != b}

    def known_path(self, promise: int, factor: float) -> list[float]:
        """K_0 to K_DEEPEST."""
        reached, path = 1.0, [1.0]
        for rate in self.known[promise][1:]:
            reached *= min(_SURE, rate.value * factor)
            path.append(reached)
        return path


def extra_tokens(known_path: Sequence[float], joins: Sequence[float], goes_on: Sequence[float]) -> list[float]:
    """Tokens that costly sources add to a known path, by depth grown: float[DEEPEST + 1].

    Args:
        joins: at the root and deeper.
        goes_on: by depth.
    """
    above = known_path[1]
    total = reached = (1.0 - above) * joins[0]
    tokens, deeper = [0.0, total], joins[1]
    for known, right in zip(known_path[2:], goes_on[2:], strict=True):
        reached = (above - known) * deeper + reached * right
        above = known
        total += reached
        tokens.append(total)
    return tokens


def promise_of(expected_tokens: float) -> int:
    """Which of the NUM_PROMISES classes the cheap sources' own estimate of their acceptance falls into."""
    return sum(expected_tokens >= bound for bound in _PROMISES)
