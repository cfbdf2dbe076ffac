"""What a drafter's trees would have gained on recorded outputs: followed along what the target answered.

Acceptance replays the target's own sampler, so the tokens that a tree saves are those of its longest path along the
output that was recorded without it. No verifier is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree, merge
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import DraftSource
from treeserve_training.records import Sample


@dataclass
class Tally:
    """Counts over trees.

    Attributes:
        steps: trees drawn.
        tokens: emitted: accepted ones and one bonus token a step.
        nodes: drafted, roots not counted.
        reached: by depth, steps in which that depth was asked: the node above was accepted and had children.
        found: by (depth, rank), steps in which the child of that rank carried the token.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    found: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float:
        """Tokens a step."""
        return self.tokens / max(1, self.steps)

    def by_depth(self) -> dict[int, float]:
        """Share of the asked steps in which a child carried the token, by the child's depth."""
        hits: Counter[int] = Counter()
        for (depth, _), count in self.found.items():
            hits[depth] += count
        return {depth: hits[depth] / count for depth, count in sorted(self.reached.items())}

    def by_rank(self) -> dict[int, float]:
        """Share of the asked steps in which the child of a rank, 1 the best, carried the token; all depths together."""
        hits: Counter[int] = Counter()
        for (_, rank), count in self.found.items():
            hits[rank] += count
        asked = max(1, self.reached.total())
        return {rank: count / asked for rank, count in sorted(hits.items())}


class Together:
    """Several sources as one: their trees merged, as a drafter without learned weights would."""

    name = "all"
    wants_top_tokens = False

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        self._sources = tuple(sources)

    def open(self, state: DraftSequence) -> None:
        """Introduce a sequence to all."""
        for source in self._sources:
            source.open(state)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Tell all."""
        for source in self._sources:
            source.commit(state, new_tokens, top_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The union of their trees."""
        trees = [source.propose(state, budget) for source in self._sources]
        found = [tree for tree in trees if tree is not None]
        return merge(found) if found else None

    def close(self, state: DraftSequence) -> None:
        """Let all forget it."""
        for source in self._sources:
            source.close(state)


def follow(source: DraftSource, samples: Iterable[Sample], budget: int) -> dict[str, Tally]:
    """Draft along recorded greedy outputs.

    Sampled ones tell nothing here: a drafter knows the noise that a request's seed gives, and training data are drawn
    with other noise.

    Args:
        samples: those of another temperature than 0 are left out.
        budget: nodes of a tree, the root not counted.

    Returns:
        A tally for each kind of sample.
    """
    tallies: dict[str, Tally] = {}
    for handle, sample in enumerate(samples):
        if sample.temperature == 0.0:
            _follow_one(source, sample, handle, budget, tallies.setdefault(sample.kind, Tally()))
    return tallies


def _follow_one(source: DraftSource, sample: Sample, handle: int, budget: int, tally: Tally) -> None:
    state = DraftSequence(handle, list(sample.prompt_ids), len(sample.prompt_ids), SamplingParams(), budget)
    left = list(sample.output_ids)
    source.open(state)
    try:
        while left:
            tree = source.propose(state, budget) or TokenTree.root_only(state.tokens[-1])
            taken = _walk(tree.pruned(budget), left, tally)
            state.tokens.extend(taken)
            source.commit(state, taken, ())
            left = left[len(taken) :]
    finally:
        source.close(state)


def _walk(tree: TokenTree, output: Sequence[int], tally: Tally) -> list[int]:
    """The tokens of a step: those that a path of the tree carries, and the bonus token."""
    node, taken = 0, 0
    while taken < len(output) - 1 and (children := _ranked(tree, node)):
        tally.reached[taken + 1] += 1
        rank = next((r for r, child in enumerate(children, 1) if tree.token_ids[child] == output[taken]), None)
        if rank is None:
            break
        tally.found[taken + 1, rank] += 1
        node = children[rank - 1]
        taken += 1
    tally.steps += 1
    tally.tokens += taken + 1
    tally.nodes += len(tree) - 1
    return list(output[: taken + 1])


def _ranked(tree: TokenTree, node: int) -> list[int]:
    """A node's children, the most probable first."""
    return sorted(tree.children[node], key=lambda child: -tree.path_log_probs[child])


def together(tallies: Iterable[Tally]) -> Tally:
    """The sum of several tallies."""
    total = Tally()
    for tally in tallies:
        total.steps += tally.steps
        total.tokens += tally.tokens
        total.nodes += tally.nodes
        total.reached += tally.reached
        total.found += tally.found
    return total
