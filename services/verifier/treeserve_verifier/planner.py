"""Which rows run in the next step: a prefill chunk or a pruned tree for each sequence, under one row budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from treeserve_core.tree import TokenTree
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.selection import Offer, RatedNode, Selection
from treeserve_verifier.sequence import Sequence

_SPARE_NODES = 4
_LEAST_PREFILL_ROWS = 16  # of a step, as far as the gap allows, whatever those who decode were promised
_LONGEST = 2.0  # where steps are long without prompts: these take half of the time at most, and can have that
_MOST_OF_A_TOKEN = 0.8  # where a row costs that much of a token, only nodes of near certainty pay


@dataclass(frozen=True)
class Candidate:
    """A running sequence before planning: its tokens without KV, and the tree that waits for it, if any.

    Attributes:
        uncomputed: committed tokens without KV, the root included: 1 while decoding, more while prefilling.
        tree: drafted tree under the present root.
        slack_ms: until its next token is due; infinite if that was not promised.
    """

    sequence: Sequence
    uncomputed: int
    tree: TokenTree | None = None
    slack_ms: float = math.inf


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence's rows: `chunk` committed tokens, and under the last of them the draft nodes of `tree`.

    Attributes:
        chunk: committed tokens that get their KV in this step. Logits are computed only if it reaches the root.
        tree: root and draft nodes; None while the chunk does not reach the root.
        expected: accepted nodes the planner counts on.
        untried: the tree that was there, if none of its nodes seemed to pay.
        context: KV positions before the chunk.
    """

    sequence: Sequence
    chunk: int
    tree: TokenTree | None
    expected: float = 0.0
    untried: TokenTree | None = None
    context: int = 0

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return self.chunk + (len(self.tree) - 1 if self.tree is not None else 0)

    @property
    def prefill_rows(self) -> int:
        """Those of them without logits."""
        return self.chunk - (self.tree is not None)

    @property
    def most_rows(self) -> int:
        """What `rows` would be if no draw had repeated a token: whether there is room must not depend on that."""
        return self.rows + (self.tree.repeated_draws if self.tree is not None else 0)

    def without_nodes(self) -> PlannedSequence:
        """The same without draft nodes."""
        return self if self.tree is None else replace(self, tree=self.tree.subtree(()), expected=0.0, untried=None)


@dataclass(frozen=True)
class StepPlan:
    """What one step runs, in order."""

    sequences: tuple[PlannedSequence, ...]

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return sum(planned.rows for planned in self.sequences)

    @property
    def prefill_rows(self) -> int:
        """Those of them without logits."""
        return sum(planned.prefill_rows for planned in self.sequences)

    @property
    def attended(self) -> float:
        """KV positions that a prefill row attends to, summed over all of them."""
        return sum(p.prefill_rows * (p.context + p.prefill_rows / 2.0) for p in self.sequences)


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

    Every decoding sequence gets its root. Draft nodes come in two phases (`Selection`), by expected acceptance f: path
    probability times the sequence's calibration. f falls along a path, so parents always come first. Zero nodes is a
    legal answer. Trees that were drawn at random (under acceptance by multi_step) come before the others, cut by a
    bound that looks at nothing but draw order and depth.

    Prefill takes what is left of the row budget, of which nodes leave it `prefill_rows`. Beside decoding sequences it
    lengthens a step to `max_decode_gap_ms` at most, or to twice what it takes without, if that is more; and, but for a
    few rows, no further than keeps sequences of the prompt's own class and of more urgent ones in time.
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
        rows = plan.rows - plan.prefill_rows
        extra_ms = self._cost.step_ms(rows) - self._cost.step_ms(rows - nodes)
        decoding = sum(p.tree is not None for p in plan.sequences)
        return extra_ms / nodes / 1e3 / self.prices(decoding).token_s

    def plan(self, candidates: SequenceOf[Candidate]) -> StepPlan:
        """The next step. Sequences beyond the row budget wait; candidates come in order of precedence."""
        decoding = [c for c in candidates if c.uncomputed == 1][: self._config.step_rows]
        waiting = [c for c in candidates if c.uncomputed > 1]
        left_to_prefill = min(sum(c.uncomputed for c in waiting), self._config.prefill_rows)
        planned, selection = self._decode(decoding, self._config.step_rows - left_to_prefill)
        left = self._config.step_rows - sum(p.rows for p in planned)
        if not decoding:
            return StepPlan(tuple(_chunks(waiting, left, lambda candidate, most: most)))
        room = _PrefillRoom(self._cost, self._config.max_decode_gap_ms, decoding, selection)
        chunks = _chunks(waiting, min(left, self._config.prefill_rows), room.rows_for)
        return StepPlan((*planned, *chunks))

    def _decode(self, decoding: SequenceOf[Candidate], max_rows: int) -> tuple[list[PlannedSequence], Selection]:
        """Roots and nodes."""
        room = max(0, max_rows - len(decoding))
        rated: list[list[RatedNode]] = []
        offers: list[Offer] = []
        for index, candidate in enumerate(decoding):
            nodes = self._rated_nodes(candidate, index)
            if candidate.tree is not None and candidate.tree.draws is not None:
                nodes = self._worth_a_row(nodes, len(decoding))[:room]
                room -= len(nodes)
                offers.append(_offer(candidate, (), nodes))
            else:
                nodes.sort()
                offers.append(_offer(candidate, nodes, ()))
            rated.append(nodes)
        selection = Selection(offers, self._cost)
        selection.choose(room)
        planned = []
        for i, (candidate, nodes) in enumerate(zip(decoding, rated, strict=True)):
            picked = [node for *_, node in nodes[: offers[i].taken + selection.counts[i]]]
            planned.append(_planned(candidate, picked, selection.expected[i]))
        return planned, selection

    def _rated_nodes(self, candidate: Candidate, index: int) -> list[RatedNode]:
        sequence, tree = candidate.sequence, candidate.tree
        if tree is None:
            return []
        depth_left = sequence.max_len - len(sequence.tokens) - 1
        limit = sequence.submission.limits.max_nodes
        rated = [
            (-min(1.0, sequence.calibration * math.exp(path_log_prob)), tree.depths[i], index, order, i)
            for order, (path_log_prob, i) in enumerate(tree.ranking)
            if tree.depths[i] <= depth_left
        ]
        return rated if limit is None else rated[:limit]

    def _worth_a_row(self, rated: SequenceOf[RatedNode], roots: int) -> list[RatedNode]:
        """Those of a drawn tree whose f exceeds the cost of a row, in tokens of plain decoding.

        Whether a draw is verified must not depend on the token it brought, and the rest of the tree does: what follows
        the draw, and whether it repeats one. So the bound is the same whatever was drawn, unlike in `Selection`.
        """
        rows = max(1, self._config.max_nodes)
        plain_ms = self._cost.step_ms(roots)
        least = (self._cost.step_ms(roots + rows) - plain_ms) / rows * roots / plain_ms
        return [node for node in rated if -node[0] > least]


class _PrefillRoom:
    """How many prefill rows a step can take beside its decoding sequences."""

    def __init__(
        self, cost: CostModel, max_gap_ms: float, decoding: SequenceOf[Candidate], selection: Selection
    ) -> None:
        self._cost = cost
        self._step_ms = selection.step_ms
        self._latest_ms = max(max_gap_ms, _LONGEST * self._step_ms)
        self._ends = [
            (candidate.sequence.submission.limits.service_class, selection.latest_end(i, self._step_ms))
            for i, candidate in enumerate(decoding)
        ]
        self._least = _LEAST_PREFILL_ROWS

    def rows_for(self, candidate: Candidate, most: int) -> int:
        """The next rows of a prompt: as many as its step may still be lengthened by. They lengthen it."""
        sequence = candidate.sequence
        context = len(sequence.tokens) - candidate.uncomputed
        own = sequence.submission.limits.service_class
        latest_ms = min((end for service_class, end in self._ends if service_class <= own), default=math.inf)
        promised = max(self._rows_until(latest_ms, most, context), min(self._least, most))
        rows = min(promised, self._rows_until(self._latest_ms, most, context))
        self._least -= min(self._least, rows)
        self._step_ms += self._cost.prefill_ms(rows, context)
        return rows

    def _rows_until(self, end_ms: float, most: int, context: int) -> int:
        return self._cost.prefill_rows_within(max(0.0, end_ms - self._step_ms), most, context)


def _chunks(
    waiting: SequenceOf[Candidate], left: int, rows_for: Callable[[Candidate, int], int]
) -> Iterator[PlannedSequence]:
    """The next rows of prompts, in order, `left` at most."""
    for candidate in waiting:
        rows = rows_for(candidate, min(candidate.uncomputed, left))
        if rows == 0:
            continue
        left -= rows
        tokens = candidate.sequence.tokens
        tree = TokenTree.root_only(tokens[-1]) if rows == candidate.uncomputed else None
        yield PlannedSequence(candidate.sequence, rows, tree, context=len(tokens) - candidate.uncomputed)


def _offer(candidate: Candidate, nodes: SequenceOf[RatedNode], taken: SequenceOf[RatedNode]) -> Offer:
    sequence = candidate.sequence
    tpot_ms, gained = sequence.promise.tpot_ms, -sum(node[0] for node in taken)
    tokens_left = sequence.max_len - len(sequence.tokens)
    if tpot_ms is None:
        return Offer(nodes, tokens_left=tokens_left, taken=len(taken), gained=gained)
    return Offer(nodes, candidate.slack_ms, tpot_ms * TPOT_SHARE, tokens_left, len(taken), gained)


def _planned(candidate: Candidate, picked: SequenceOf[int], expected: float) -> PlannedSequence:
    sequence, tree = candidate.sequence, candidate.tree
    context = len(sequence.tokens) - 1
    if tree is None:
        return PlannedSequence(sequence, 1, TokenTree.root_only(sequence.tokens[-1]), context=context)
    return PlannedSequence(sequence, 1, tree.subtree(picked), expected, None if picked else tree, context)
