"""Grows one tree per sequence out of what all draft sources propose."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import structlog

from treeserve_core.features import FeatureShape
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import check_token_ids
from treeserve_core.tree import TokenTree, merge
from treeserve_speculator.choice import SourceChooser
from treeserve_speculator.feedback import visits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.mixture import MixBounds, Mixture
from treeserve_speculator.sequence import UNPRICED, CommittedTokens, DraftPrices, DraftSequence
from treeserve_speculator.sources.base import BatchDraftSource, DraftSource, FeatureDraftSource

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TreeLimits:
    """Bounds of a tree: most nodes, the root not counted, and the deepest node."""

    max_nodes: int
    max_depth: int

    def within(self, other: TreeLimits) -> TreeLimits:
        """The tighter of both bounds."""
        return TreeLimits(min(self.max_nodes, other.max_nodes), min(self.max_depth, other.max_depth))


class _Member:
    """A source as the drafter keeps it.

    Attributes:
        mask: its bit.
        seconds: its time that was not counted yet.
    """

    __slots__ = ("batched", "counters", "mask", "seconds", "source")

    def __init__(self, source: DraftSource, bit: int, metrics: SpeculatorMetrics) -> None:
        self.source = source
        self.batched = source if isinstance(source, BatchDraftSource) else None
        self.mask = 1 << bit
        self.counters = metrics.of_source(source.name)
        self.seconds = 0.0


class Drafter:
    """Asks sources about every sequence, and makes one tree of the nodes that are likely to be worth their price.

    Sources that cost next to nothing are asked always, the others where that promises to pay (`SourceChooser`).

    Not thread-safe: one thread makes all calls. A source that fails on a sequence is closed for that sequence alone.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource],
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        limits: TreeLimits,
        metrics: SpeculatorMetrics,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._members = tuple(_Member(source, bit, metrics) for bit, source in enumerate(sources))
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        self._metrics = metrics
        self._clock_s = clock_s
        self._choice = SourceChooser(self.source_names)
        self._mixture = Mixture(eos_token_ids)
        self._lessons: list[Callable[[], None]] = []

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        """The sources, in the order of their bits."""
        return tuple(member.source for member in self._members)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources; bit k of a node's source mask stands for the k-th."""
        return tuple(source.name for source in self.sources)

    @property
    def wants_top_tokens(self) -> bool:
        """Whether some source learns from the target's top tokens."""
        return any(source.wants_top_tokens for source in self.sources)

    @property
    def feature_shape(self) -> FeatureShape | None:
        """Of the target's hidden states, if some source wants them."""
        return next((s.feature_shape for s in self.sources if isinstance(s, FeatureDraftSource)), None)

    def open(self, sequence: DraftSequence) -> None:
        """Introduce a new sequence to all sources."""
        self._metrics.sequences.inc()
        for source in self.sources:
            self._guarded(source, sequence, source.open, sequence)

    def commit(self, sequence: DraftSequence, committed: CommittedTokens) -> None:
        """Advance a sequence and tell all sources.

        Raises:
            StaleBaseError: if the commit does not follow what is known; nothing changes then.
        """
        sequence.advance(committed.base_committed_len, committed.token_ids, committed.budget)
        sequence.take_features(committed.features)
        tokens, top = committed.token_ids, committed.top_tokens
        if not tokens:
            return
        self._lessons += (
            self._choice.lesson(sequence, tokens),
            self._mixture.lesson(sequence.mixed, tokens),
            functools.partial(self._record_visits, sequence.tree, tokens),
        )
        sequence.tree = None
        began = self._clock_s()
        for member in self._members:
            self._guarded(member.source, sequence, member.source.commit, sequence, tokens, top)
            ended = self._clock_s()
            member.seconds += ended - began
            began = ended

    def learn(self) -> None:
        """Learn from what was committed and drafted since the last time, and count it: when the trees have left."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            lesson()
        for member in self._members:
            member.counters.seconds.inc(member.seconds)
            member.seconds = 0.0

    def close(self, sequence: DraftSequence) -> None:
        """Let all sources forget a sequence."""
        self._metrics.sequences.dec()
        self._choice.close(sequence)
        for source in self.sources:
            self._guarded(source, sequence, source.close, sequence)

    def draft(
        self, sequences: Sequence[DraftSequence], limits: TreeLimits, prices: DraftPrices = UNPRICED
    ) -> list[DraftProposal]:
        """One proposal per sequence, in order; a tree of its root alone where no source had an idea.

        Args:
            sequences: each with a positive budget.
            limits: the verifier's own bounds.
            prices: what the verifier pays; while that is not known, no source is spared.
        """
        started = self._clock_s()
        limits = limits.within(self._limits)
        found: dict[DraftSequence, list[TokenTree]] = {sequence: [] for sequence in sequences}
        for sequence in sequences:
            sequence.prices = prices
        choosable = self._choice.begin(len(sequences), prices)
        self._collect(found, limits, [member for member in self._members if member.source.name not in choosable])
        for sequence, known in found.items():
            sequence.shapes = self._choice.choose(sequence, tuple(known))
        if choosable:
            self._collect(found, limits, [member for member in self._members if member.source.name in choosable])
        trees = [self._combined(sequence, trees, limits) for sequence, trees in found.items()]
        for sequence, tree in zip(sequences, trees, strict=True):
            sequence.tree = tree
            self._lessons.append(functools.partial(self._choice.drafted, sequence))
        elapsed = self._clock_s() - started
        self._metrics.draft_seconds.observe(elapsed)
        self._metrics.trees.inc(len(trees))
        self._metrics.empty_trees.inc(sum(len(tree) == 1 for tree in trees))
        self._lessons.append(functools.partial(self._record_nodes, trees))
        return [
            DraftProposal(len(sequence.tokens), tree, round(elapsed * 1e6))
            for sequence, tree in zip(sequences, trees, strict=True)
        ]

    def _collect(
        self, found: Mapping[DraftSequence, list[TokenTree]], limits: TreeLimits, members: Sequence[_Member]
    ) -> None:
        """Add the trees of some sources to what was found, and note their times."""
        began = self._clock_s()
        for member in members:
            name = member.source.name
            asked = [s for s in found if name in s.shapes] if self._choice.chooses(name) else list(found)
            for sequence, tree in self._ask(member, asked, limits):
                if tree is not None:
                    found[sequence].append(tree.drafted_by(member.mask))
            ended = self._clock_s()
            self._choice.took(name, asked, ended - began)
            member.seconds += ended - began
            began = ended

    def _ask(
        self, member: _Member, sequences: Sequence[DraftSequence], limits: TreeLimits
    ) -> Iterator[tuple[DraftSequence, TokenTree | None]]:
        """The source's tree for each sequence that it did not fail on."""
        source = member.source
        wanted = [(s, min(s.budget, limits.max_nodes)) for s in sequences if source.name not in s.disabled]
        batch = None if member.batched is None else self._ask_batch(member.batched, wanted)
        if batch is not None:
            for (sequence, _), tree in zip(wanted, batch, strict=True):
                yield sequence, self._guarded(source, sequence, self._checked, sequence, tree)
        else:  # after a failed batch too: asked alone, the sequence that failed shows itself
            for sequence, budget in wanted:
                yield sequence, self._guarded(source, sequence, self._proposed, source, sequence, budget)

    def _proposed(self, source: DraftSource, sequence: DraftSequence, budget: int) -> TokenTree | None:
        return self._checked(sequence, source.propose(sequence, budget))

    def _ask_batch(
        self, source: BatchDraftSource, wanted: Sequence[tuple[DraftSequence, int]]
    ) -> list[TokenTree | None] | None:
        try:
            trees = source.propose_batch(wanted)
            if len(trees) != len(wanted):
                raise ValueError(f"{len(trees)} trees for {len(wanted)} sequences")
        except Exception as error:
            _log.warning("draft source failed on a batch", source=source.name, error=repr(error))
            return None
        return trees

    def _checked(self, sequence: DraftSequence, tree: TokenTree | None) -> TokenTree | None:
        if tree is None:
            return None
        if tree.token_ids[0] != sequence.tokens[-1]:
            raise ValueError(f"the root is {tree.token_ids[0]}, not the last committed token {sequence.tokens[-1]}")
        if tree.log_probs is None:
            raise ValueError("the tree has no log-probabilities")
        check_token_ids("tree", tree.token_ids, self._vocab_size)
        for draws in filter(None, tree.draws or ()):
            check_token_ids("tree", draws.support, self._vocab_size)
        return tree

    def _combined(self, sequence: DraftSequence, trees: Sequence[TokenTree], limits: TreeLimits) -> TokenTree:
        sequence.mixed.forget()
        if not trees:
            return TokenTree.root_only(sequence.tokens[-1])
        max_nodes = min(sequence.budget, limits.max_nodes)
        if any(tree.draws is not None for tree in trees):  # what was drawn is ranked by its order alone
            return _cut_below(merge(trees), self._eos_token_ids).pruned(max_nodes, limits.max_depth)
        bounds = MixBounds(max_nodes, limits.max_depth, least=sequence.prices.node)
        return self._mixture.mix(sequence.mixed, trees, bounds, is_greedy=sequence.is_greedy)

    def _guarded(
        self, source: DraftSource, sequence: DraftSequence, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T | None:
        """`call`, unless the source failed on this sequence before; a failure now is counted and is its last."""
        if source.name in sequence.disabled:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            sequence.disabled.add(source.name)
            self._metrics.source_failures.labels(source.name).inc()
            _log.warning("draft source failed on a sequence", source=source.name, error=repr(error))
        try:
            source.close(sequence)
        except Exception as error:
            _log.warning("draft source failed to close a sequence", source=source.name, error=repr(error))
        return None

    def _record_visits(self, tree: TokenTree | None, tokens: Sequence[int]) -> None:
        """Count by source how often the latest tree was right."""
        if tree is None or tree.source_masks is None:
            return
        masks = tree.source_masks
        for visit in visits(tree, tokens):
            proposed = functools.reduce(operator.or_, (masks[child] for child in tree.children[visit.parent]))
            for member in self._members:
                if proposed & member.mask:
                    member.counters.visits.inc()
                    member.counters.right.inc(visit.child is not None and bool(masks[visit.child] & member.mask))

    def _record_nodes(self, trees: Sequence[TokenTree]) -> None:
        """Count them by source."""
        for member in self._members:
            nodes = sum(bool(mask & member.mask) for tree in trees for mask in tree.source_masks or ())
            member.counters.nodes.inc(nodes)


def _cut_below(tree: TokenTree, eos_token_ids: frozenset[int]) -> TokenTree:
    """The tree without what hangs below an end-of-sequence node; the root's children stay."""
    kept = {0}
    for i in range(1, len(tree)):
        parent = tree.parents[i]
        if parent in kept and (parent == 0 or tree.token_ids[parent] not in eos_token_ids):
            kept.add(i)
    return tree if len(kept) == len(tree) else tree.subtree(i for _, i in tree.ranking if i in kept)
