"""Which rows run in the next step: a prefill chunk or a pruned tree for each sequence, under one row budget."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from treeserve_core.tree import TokenTree
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.sequence import Sequence

_SPARE_NODES = 4
_MOST_OF_A_TOKEN = 0.8  # where a row costs that much of a token, only nodes of near certainty pay

_RatedNode = tuple[float, int, int, int, int]  # -f, depth, candidate, place in the tree's ranking, node


@dataclass(frozen=True)
class Candidate:
    """A running sequence before planning: its tokens without KV, and the tree that waits for it, if any.

    Attributes:
        uncomputed: committed tokens without KV, the root included: 1 while decoding, more while prefilling.
        tree: drafted tree under the present root.
    """

    sequence: Sequence
    uncomputed: int
    tree: TokenTree | None = None


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence's rows: `chunk` committed tokens, and under the last of them the draft nodes of `tree`.

    Attributes:
        chunk: committed tokens that get their KV in this step. Logits are computed only if it reaches the root.
        tree: root and draft nodes; None while the chunk does not reach the root.
        expected: accepted nodes the planner counts on.
        untried: the tree that was there, if none of its nodes seemed to pay.
    """

    sequence: Sequence
    chunk: int
    tree: TokenTree | None
    expected: float = 0.0
    untried: TokenTree | None = None

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return self.chunk + (len(self.tree) - 1 if self.tree is not None else 0)

    @property
    def most_rows(self) -> int:
        """What `rows` would be if no draw had repeated a token: whether there is room must not depend on that."""
        return self.rows + (self.tree.repeated_draws if self.tree is not None else 0)


@dataclass(frozen=True)
class StepPlan:
    """What one step runs, in order."""

    sequences: tuple[PlannedSequence, ...]

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return sum(planned.rows for planned in self.sequences)


@dataclass(frozen=True)
class Prices:
    """What plain decoding pays, and what a draft node does.

    Attributes:
        token_s: seconds of a step for each of its sequences, t(b) / b.
        row: cost of one more row for each of them, in tokens: (t(2 b) - t(b)) / t(b).
        node: the least that a draft node costs when each of them has n, in tokens: min of (t(b + n b) - t(b)) / n t(b).
    """

    token_s: float
    row: float
    node: float = 0.0


class StepPlanner:
    """Chooses the rows of each step. It keeps no state of its own.

    Every decoding sequence gets its root. Draft nodes are then taken in order of expected acceptance f (path
    probability times the sequence's calibration) as long as they raise emitted tokens per unit time:
    n* = argmax over n of (roots + sum of the n largest f) / t(roots + n). f falls along a path, so parents always come
    first. Zero nodes is a legal answer. Trees that were drawn at random (under acceptance by multi_step) come before
    the others, cut by a bound that looks at nothing but draw order and depth. Prefill takes what is left of the row
    budget; nodes leave it `prefill_rows`.
    """

    def __init__(self, config: VerifierConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost

    def draft_budget(self, sequence: Sequence, running: int) -> int:
        """Nodes a drafter should draw for the sequence, the root not counted; 0 where none would pay."""
        limit = sequence.submission.limits.max_nodes
        share = (self._config.step_rows - running) // max(running, 1)
        if sequence.max_len - len(sequence.tokens) <= 1:  # the bonus token alone finishes it
            return 0
        if self.prices(running).row > _MOST_OF_A_TOKEN:
            return 0
        # Twice what steps verify of its trees lately, and a few: enough to choose from, and to find out that more pays.
        pays = math.ceil(2.0 * sequence.verified) + _SPARE_NODES
        return max(0, min(self._config.max_nodes, share, pays, self._config.max_nodes if limit is None else limit))

    def prices(self, decoding: int) -> Prices:
        """What tokens and rows cost while so many sequences decode."""
        roots = max(decoding, 1)
        step_ms = self._cost.step_ms(roots)
        row = self._cost.step_ms(2 * roots) / step_ms - 1.0
        # A stair's last row is its cheapest.
        stairs = ((rows / roots - 1.0, ms / step_ms - 1.0) for rows, ms in self._cost.table.items())
        node = min((cost / nodes for nodes, cost in stairs if nodes >= 1.0), default=row)
        return Prices(step_ms / roots / 1e3, row, max(0.0, node))

    def node_cost(self, plan: StepPlan) -> float:
        """What one draft node of a plan costs, in tokens: as many as plain decoding emits in that time."""
        nodes = sum(p.rows - p.chunk for p in plan.sequences)
        if nodes == 0:
            return 0.0
        extra_ms = self._cost.step_ms(plan.rows) - self._cost.step_ms(plan.rows - nodes)
        decoding = sum(p.tree is not None for p in plan.sequences)
        return extra_ms / nodes / 1e3 / self.prices(decoding).token_s

    def plan(self, candidates: SequenceOf[Candidate]) -> StepPlan:
        """The next step. Sequences beyond the row budget wait; candidates come in order of precedence."""
        decoding = [c for c in candidates if c.uncomputed == 1][: self._config.step_rows]
        waiting = sum(c.uncomputed for c in candidates if c.uncomputed > 1)
        planned = self._trees(decoding, self._config.step_rows - min(waiting, self._config.prefill_rows))
        left = self._config.step_rows - sum(p.rows for p in planned)
        if planned:
            left = min(left, self._config.prefill_rows)
        for candidate in candidates:
            if candidate.uncomputed > 1 and left > 0:
                chunk = min(candidate.uncomputed, left)
                tree = None
                if chunk == candidate.uncomputed:
                    tree = TokenTree.root_only(candidate.sequence.tokens[-1])
                planned.append(PlannedSequence(candidate.sequence, chunk, tree))
                left -= chunk
        return StepPlan(tuple(planned))

    def _trees(self, decoding: SequenceOf[Candidate], max_rows: int) -> list[PlannedSequence]:
        room = max(0, max_rows - len(decoding))
        nodes: list[_RatedNode] = []
        taken: list[_RatedNode] = []
        for index, candidate in enumerate(decoding):
            if candidate.tree is None:
                continue
            rated = self._rated_nodes(candidate, candidate.tree, index)
            if candidate.tree.draws is None:
                nodes += rated
            else:
                drawn = self._worth_a_row(rated, len(decoding))[:room]
                taken += drawn
                room -= len(drawn)
        nodes.sort()
        nodes = nodes[:room]
        taken += nodes[: self._paying(len(decoding), [-n[0] for n in taken], [-n[0] for n in nodes])]
        chosen: list[list[int]] = [[] for _ in decoding]
        expected = [0.0] * len(decoding)
        for negative_f, _, index, _, node in taken:
            chosen[index].append(node)
            expected[index] -= negative_f
        return [
            PlannedSequence(
                c.sequence,
                1,
                TokenTree.root_only(c.sequence.tokens[-1]) if c.tree is None else c.tree.subtree(picked),
                value,
                None if picked else c.tree,
            )
            for c, picked, value in zip(decoding, chosen, expected, strict=True)
        ]

    def _rated_nodes(self, candidate: Candidate, tree: TokenTree, index: int) -> list[_RatedNode]:
        sequence = candidate.sequence
        depth_left = sequence.max_len - len(sequence.tokens) - 1
        limit = sequence.submission.limits.max_nodes
        rated = [
            (-min(1.0, sequence.calibration * math.exp(path_log_prob)), tree.depths[i], index, order, i)
            for order, (path_log_prob, i) in enumerate(tree.ranking)
            if tree.depths[i] <= depth_left
        ]
        return rated if limit is None else rated[:limit]

    def _worth_a_row(self, rated: SequenceOf[_RatedNode], roots: int) -> list[_RatedNode]:
        """Those of a drawn tree whose f exceeds the cost of a row, in tokens of plain decoding.

        Whether a draw is verified must not depend on the token it brought, and the rest of the tree does: what follows
        the draw, and whether it repeats one. So the bound is the same whatever was drawn, unlike in `_paying`.
        """
        rows = max(1, self._config.max_nodes)
        plain_ms = self._cost.step_ms(roots)
        least = (self._cost.step_ms(roots + rows) - plain_ms) / rows * roots / plain_ms
        return [node for node in rated if -node[0] > least]

    def _paying(self, roots: int, taken: SequenceOf[float], f: SequenceOf[float]) -> int:
        """How many of the nodes, best first, maximise emitted tokens per unit time, beside roots and nodes taken."""
        best, best_rate, emitted = 0, 0.0, roots + sum(taken)
        for n in range(len(f) + 1):
            if n > 0:
                emitted += f[n - 1]
            rate = emitted / self._cost.step_ms(roots + len(taken) + n)
            if rate > best_rate:
                best, best_rate = n, rate
        return best
