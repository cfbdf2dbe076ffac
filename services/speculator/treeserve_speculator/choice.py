"""Chooses for each tree which costly sources grow it, and how far: what promises most tokens per unit time.

A contextual bandit with a model. Sources that cost next to nothing are asked for every tree, and what they promise is
the context of the choice, beside the kind of text, how often sources were right in this sequence lately, and how many
sequences share the time. A choice's reward is

    (accepted tokens + 1) / (a token's time + the price of the rows + the time of the costly sources)

and its expectation follows from the rates of `KindRates`, which every followed tree teaches for all smaller choices at
once. The longer a source was not asked in a sequence, the more it is given the benefit of the doubt; so it is tried
again, at first one level deep.

Whether a tree is asked for at all is the verifier's to decide (its Pace): it knows what waiting costs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from treeserve_core.tree import TokenTree
from treeserve_speculator.learned_rates import DEEPEST, Factor, KindRates, extra_tokens, promise_of
from treeserve_speculator.presets import DEPTHS, PRESETS, WIDTHS, TextKind
from treeserve_speculator.sequence import UNPRICED, DraftPrices, DraftSequence, TreeShape
from treeserve_speculator.source_times import SourceTimes

_Rates: TypeAlias = tuple[list[float], list[float]]

_COSTLY, _CHEAP = 0.15, 0.1  # of a token's time
_WARM_UP = 3  # timings before a source is judged
_LOOKED_AT = 24  # first nodes of a cheap tree, which are its best
_NEW_TEXT = 24.0  # tokens without a source that a new sequence starts with
_DOUBT = 48.0  # tokens without a source that double its chances
_CAUGHT_UP = 2 * DEEPEST  # tokens that a model may have to read first without its timing counting for less
_MOST_MASS = 0.9  # a level that is as sure as that is always grown
_LEVEL_NODES = 1.5  # that a level adds
_NODES_SMOOTHING = 0.05
_ROUND_TRIP_S = 0.0005  # on loopback


@dataclass(frozen=True)
class _Asked:
    """A costly source that grew the latest tree. Width and depth are indices of WIDTHS and DEPTHS."""

    name: str
    bit: int
    width: int
    depth: int


@dataclass(eq=False)
class _Choice:
    """Who grew a tree.

    Attributes:
        known_trees: of the cheap sources.
        known_mask: their bits.
        asked: who grew it besides them.
    """

    known_trees: tuple[TokenTree, ...] = ()
    known_mask: int = 0
    asked: tuple[_Asked, ...] = ()

    @functools.cached_property
    def promise(self) -> int:
        """Class of what the cheap sources promised."""
        return promise_of(max(map(_expected_tokens, self.known_trees), default=0.0))


@dataclass(eq=False)
class _Memory:
    """What is known of one sequence.

    Attributes:
        known, extra: how well cheap and costly sources do at present.
        idle: committed tokens since a source was last asked.
        choice: for the latest tree.
    """

    kind: KindRates
    known: Factor = field(default_factory=Factor)
    extra: Factor = field(default_factory=Factor)
    idle: defaultdict[str, float] = field(default_factory=lambda: defaultdict(lambda: _NEW_TEXT))
    choice: _Choice = field(default_factory=_Choice)

    def scaled(self, source: str, width: int, besides: Sequence[str]) -> _Rates:
        """What is to be expected of a costly source beside others: `SourceRates.scaled`."""
        kind = self.kind
        chances = self.extra.value * (1.0 + self.idle[source] / _DOUBT)
        most = min((kind.beyond[source, other].value for other in besides), default=1.0)
        return kind.sources[source].scaled(self.choice.promise, width, chances, most)

    def relax(self, num_tokens: int) -> None:
        """Text went by."""
        self.known.relax(num_tokens)
        self.extra.relax(num_tokens)
        for name in self.idle:
            self.idle[name] += num_tokens

    def see_known(self, choice: _Choice, depth: int, *, hit: bool) -> None:
        """On the cheap sources' path they had the next token, or not."""
        rate = self.kind.known[choice.promise][depth]
        self.known.see(hit, rate.value)
        rate.see(hit)

    def see_extra(
        self, choice: _Choice, depth: int, above: int, below: int, expanded: int, rank: int, *, on_known: bool
    ) -> None:
        """The cheap sources did not have the next token.

        Args:
            above, below: who proposed the visited node, and its child that carries the token.
            expanded: who proposed children of the node.
            rank: of that child.
        """
        tried = [a for a in choice.asked if depth <= DEPTHS[a.depth] and (on_known or above & a.bit)]
        for asked in tried:
            hit = bool(below & asked.bit)
            rates = self.kind.sources[asked.name]
            self.extra.see(hit, rates.rate(choice.promise, depth, asked.width, on_known=on_known).value)
            for width in range(asked.width + 1):
                narrow_hit = hit and (width == asked.width or rank < WIDTHS[width])
                rates.rate(choice.promise, depth, width, on_known=on_known).see(narrow_hit)
            if above & asked.bit:
                rates.see_deeper(expanded=bool(expanded & asked.bit), hit=hit)
            for other in tried:
                if other is not asked and not below & other.bit:
                    self.kind.beyond[asked.name, other.name].see(hit)


class SourceChooser:
    """Learns from every tree of this process; not thread-safe. Without prices every source runs, within its own limits.

    Args:
        sources: names, in the order of their bits.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._names = tuple(sources)
        self._times = {name: SourceTimes() for name in sources}
        self._costly: dict[str, int] = {}  # bit by name
        self._kinds: dict[TextKind, KindRates] = {}
        self._nodes: dict[tuple[str, int], float] = {}
        self._memories: dict[DraftSequence, _Memory] = {}
        self._prices = UNPRICED
        self._load = 1
        self._per_second = 0.0  # plain tokens of one sequence
        self._time = 1.0  # of a step without costly sources, in such tokens

    def close(self, sequence: DraftSequence) -> None:
        """Forget a sequence."""
        self._memories.pop(sequence, None)

    def _memory(self, sequence: DraftSequence) -> _Memory:
        memory = self._memories.get(sequence)
        if memory is None:
            kind = TextKind.of(sequence)
            if kind not in self._kinds:
                self._kinds[kind] = KindRates(PRESETS[kind.preset], self._names, kind.sampled)
            memory = self._memories[sequence] = _Memory(self._kinds[kind])
        return memory

    def begin(self, load: int, prices: DraftPrices) -> frozenset[str]:
        """Trees for so many sequences are wanted: the names of the sources to `choose` among; ask all others."""
        self._load, self._prices = load, prices
        self._per_second = 1e6 / prices.token_us if prices.token_us > 0.0 else 0.0
        self._time = 1.0 + _ROUND_TRIP_S / load * self._per_second
        for bit, name in enumerate(self._names):
            if name in self._costly:
                if self._share(name) < _CHEAP:
                    del self._costly[name]
            elif self._times[name].measured >= _WARM_UP and self._share(name) > _COSTLY:
                self._costly[name] = bit
        return frozenset(self._costly)

    def _share(self, name: str) -> float:
        """The source's time for its largest tree, in tokens; 0 while a token's time is not known."""
        return self._times[name].largest_s(self._load) * self._per_second

    def chooses(self, name: str) -> bool:
        """Whether the source is asked for some sequences only."""
        return name in self._costly

    def choose(self, sequence: DraftSequence, known_trees: Sequence[TokenTree]) -> dict[str, TreeShape]:
        """Which costly sources to ask for the next tree, and how far each is to grow it.

        Args:
            known_trees: what the others proposed.
        """
        memory = self._memory(sequence)
        known_mask = (1 << len(self._names)) - 1 - sum(1 << bit for bit in self._costly.values())
        choice = memory.choice = _Choice(tuple(known_trees), known_mask)
        candidates = [name for name in self._costly if name not in sequence.disabled]
        if not candidates:
            return {}
        chosen, width, depth, rate = self._best(memory, candidates)
        choice.asked = tuple(_Asked(name, 1 << self._costly[name], width, depth) for name in chosen)
        for name in candidates:
            if name not in chosen:
                memory.kind.sources[name].fade(choice.promise)
        return {name: self._shape(memory, name, width, depth, rate) for name in chosen}

    def _best(self, memory: _Memory, candidates: Sequence[str]) -> tuple[list[str], int, int, float]:
        """The best set of sources, their width and depth, and the tokens they promise in the time of a plain one.

        Sources are added one by one, the first with the shape that suits it best, others with the same shape.
        """
        path = memory.kind.known_path(memory.choice.promise, memory.known.value)
        tokens, time = sum(path), self._time + self._node_cost("", memory.choice.promise)
        chosen: list[str] = []
        joint: _Rates | None = None
        rate, width, depth = tokens / time, 0, 0
        widths, depths = memory.kind.widths, tuple(range(len(DEPTHS)))
        while len(chosen) < len(candidates):
            best: tuple[str, int, int, float, _Rates] | None = None
            for name in candidates:
                if name in chosen:
                    continue
                for w in widths:
                    rates = _either(joint, memory.scaled(name, w, chosen))
                    extra = extra_tokens(path, *rates)
                    costs = self._costs(name, w)
                    for d in depths:
                        promised = (tokens + extra[DEPTHS[d]]) / (time + costs[d])
                        if promised > rate:
                            rate, best = promised, (name, w, d, time + costs[d], rates)
            if best is None:
                break
            name, width, depth, time, joint = best
            chosen.append(name)
            widths, depths = (width,), (depth,)
        return chosen, width, depth, rate

    def _shape(self, memory: _Memory, name: str, width: int, depth: int, rate: float) -> TreeShape:
        """A level pays if its nodes are followed, and their children right, more often than its price gives tokens."""
        first, two = self._times[name].seconds(width, self._load)[:2]
        level_s = min(first, max(two - first, first / 2.0))
        price = rate * (level_s * self._per_second + _LEVEL_NODES * self._prices.node)
        return TreeShape(DEPTHS[depth], WIDTHS[width], min(_MOST_MASS, price / memory.kind.sources[name].deeper.value))

    def _costs(self, name: str, width: int) -> list[float]:
        """Time of a source and the price of its nodes by depth, in tokens of plain decoding."""
        seconds = self._times[name].seconds(width, self._load)
        return [s * self._per_second + self._node_cost(name, depth) for depth, s in enumerate(seconds)]

    def _node_cost(self, name: str, index: int) -> float:
        """Price of the nodes that are worth verifying: of a source by depth, of the cheap ones by their promise."""
        return self._nodes.get((name, index), 0.0) * self._prices.node

    def took(self, name: str, sequences: Sequence[DraftSequence], seconds: float) -> None:
        """A source took so long for these sequences."""
        if not sequences:
            return
        times, each = self._times[name], seconds / len(sequences)
        if name not in self._costly:
            times.observe(len(WIDTHS) - 1, len(DEPTHS) - 1, len(sequences), each)
            return
        memories = [self._memory(sequence) for sequence in sequences]
        asked = [asked for memory in memories for asked in memory.choice.asked if asked.name == name]
        if all(memory.idle[name] <= _CAUGHT_UP for memory in memories):  # else it may have read a prompt
            width, depth = max(a.width for a in asked), max(a.depth for a in asked)
            times.observe(width, depth, len(sequences), each)
        for memory in memories:
            memory.idle[name] = 0.0

    def drafted(self, sequence: DraftSequence) -> None:
        """The sequence's latest tree came of the latest choice."""
        memory, price, tree = self._memories.get(sequence), self._prices.node, sequence.tree
        if memory is None or tree is None or tree.source_masks is None or price <= 0.0:
            return
        choice = memory.choice
        least = math.log(min(1.0, price))
        paying = [
            mask for mask, path in zip(tree.source_masks[1:], tree.path_log_probs[1:], strict=True) if path > least
        ]
        extra = [mask for mask in paying if not mask & choice.known_mask]
        self._count("", choice.promise, len(paying) - len(extra))
        for asked in choice.asked:
            self._count(asked.name, asked.depth, sum(1 for mask in extra if mask & asked.bit))

    def _count(self, name: str, index: int, nodes: int) -> None:
        mean = self._nodes.setdefault((name, index), float(nodes))
        self._nodes[name, index] += _NODES_SMOOTHING * (nodes - mean)

    def lesson(self, sequence: DraftSequence, new_tokens: Sequence[int]) -> Callable[[], None]:
        """The target committed these tokens: what learns from that, at any time before the next lesson.

        The sequence's latest tree, if it has one, is followed along them.
        """
        memory = self._memory(sequence)
        return functools.partial(self._learn, memory, memory.choice, sequence.tree, new_tokens)

    def _learn(self, memory: _Memory, choice: _Choice, tree: TokenTree | None, new_tokens: Sequence[int]) -> None:
        memory.relax(len(new_tokens))
        if tree is None or tree.source_masks is None:
            return
        masks, node, known_mask = tree.source_masks, 0, choice.known_mask
        for depth, token_id in enumerate(new_tokens[:DEEPEST], start=1):
            above = masks[node] if node > 0 else known_mask
            child = tree.child(node, token_id)
            below = masks[child] if child is not None else 0
            on_known = bool(above & known_mask)
            if on_known:
                memory.see_known(choice, depth, hit=bool(below & known_mask))
            if not below & known_mask:
                rank = 0 if child is None else _rank(tree, node, child)
                expanded = functools.reduce(operator.or_, (masks[c] for c in tree.children[node]), 0)
                memory.see_extra(choice, depth, above, below, expanded, rank, on_known=on_known)
            if child is None:
                return
            node = child


def _either(first: _Rates | None, second: _Rates) -> _Rates:
    """How often one of two is right, if they are right independently of each other."""
    if first is None:
        return second
    joins, goes_on = ([a + b - a * b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True))
    return joins, goes_on


def _rank(tree: TokenTree, parent: int, child: int) -> int:
    """How many siblings were rated higher than a child."""
    log_probs = tree.log_probs
    return 0 if log_probs is None else sum(log_probs[c] > log_probs[child] for c in tree.children[parent])


def _expected_tokens(tree: TokenTree) -> float:
    """Tokens that a tree promises by its own estimate."""
    log_probs = tree.log_probs
    if log_probs is None:
        return 0.0
    reached = [1.0]
    for parent, log_prob in zip(tree.parents[1 : _LOOKED_AT + 1], log_probs[1 : _LOOKED_AT + 1], strict=True):
        reached.append(reached[parent] * math.exp(log_prob))
    return sum(reached) - 1.0
