"""Which rows run in the next step: a prefill chunk or a pruned tree for each sequence, under one row budget."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import CostModel, Prices
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.selection import Offer, RatedNode, Selection
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import Candidate, PlannedSequence, StepPlan
from treeserve_verifier.step_room import STEPS, Patience, StepRoom, is_realtime

_SPARE_NODES = 4
_MOST_OF_A_TOKEN = 0.8  # where a row costs that much of a token, only nodes of near certainty pay


class StepPlanner:
    """Chooses the rows of each step. It keeps no state of its own.

    Decoding sequences get their roots. Draft nodes come in two phases (`Selection`), by expected acceptance f: path
    probability times the sequence's calibration. f falls along a path, so parents always come first. Zero nodes is a
    legal answer. Trees that were drawn at random (under acceptance by multi_step) come before the others, cut by a
    bound that looks at nothing but draw order and depth.

    Prefill takes what is left of the row budget, of which nodes leave it `prefill_rows`. Beside decoding sequences it
    is bounded by what those were promised, and those among them that have time to spare may leave their rows to it
    (`StepRoom`).
    """

    def __init__(self, config: VerifierConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost

    def draft_budget(self, sequence: Sequence, running: int) -> int:
        """Nodes a drafter should draw for the sequence, the root not counted; 0 where none would pay."""
        # Twice what steps verify of its trees lately, and a few: enough to choose from, and to find out that more pays.
        pays = math.ceil(2.0 * sequence.verified) + _SPARE_NODES
        return min(self.most_nodes(sequence, running), pays)

    def most_nodes(self, sequence: Sequence, running: int) -> int:
        """The same, however many of its nodes were verified lately."""
        limit = sequence.submission.limits.max_nodes
        share = (self._config.step_rows - running) // max(running, 1)
        if sequence.max_len - len(sequence.tokens) <= 1:  # the bonus token alone finishes it
            return 0
        if self._cost.prices(running).row > _MOST_OF_A_TOKEN and self._cost.is_proved(2 * max(running, 1)):
            return 0
        return max(0, min(self._config.max_nodes, share, self._config.max_nodes if limit is None else limit))

    @property
    def step_rows(self) -> int:
        """Most rows of a step."""
        return self._config.step_rows

    @property
    def cost_table(self) -> dict[int, float]:
        """Milliseconds of a step by its rows with logits."""
        return self._cost.table

    def prices(self, decoding: int) -> Prices:
        """What tokens and rows cost while so many sequences decode."""
        return self._cost.prices(decoding)

    def node_cost(self, plan: StepPlan) -> float:
        """What one draft node of a plan costs, in tokens: as many as plain decoding emits in that time."""
        nodes = sum(p.rows - p.chunk for p in plan.sequences)
        decoding = sum(p.tree is not None for p in plan.sequences)
        return self.cost_of_node(plan.rows - plan.prefill_rows, nodes, decoding)

    def cost_of_node(self, rows: int, nodes: int, decoding: int) -> float:
        """The same of a step of so many rows with logits, so many of them draft nodes, for so many sequences."""
        if nodes == 0:
            return 0.0
        extra_ms = self._cost.step_ms(rows) - self._cost.step_ms(rows - nodes)
        return extra_ms / nodes / 1e3 / self._cost.prices(decoding).token_s

    def plan(self, candidates: SequenceOf[Candidate]) -> StepPlan:
        """The next step. Sequences beyond the row budget wait; candidates come in order of precedence."""
        decoding = [c for c in candidates if c.uncomputed == 1][: self._config.step_rows]
        prompts = [c for c in candidates if c.uncomputed > 1]
        if not prompts:
            return StepPlan(tuple(self._decode(decoding, self._config.step_rows)[0]))
        patience = Patience(decoding, self._cost, self._config.max_decode_gap_ms)
        patient = patience.who_can_wait_for(prompts)
        impatient = [c for c in decoding if c not in patient]
        is_shared = decoding and not is_realtime(prompts[0])
        prefill_rows = self._config.prefill_rows if is_shared else self._config.step_rows - len(impatient)
        for_prompts = min(sum(c.uncomputed for c in prompts), prefill_rows)
        planned, selection = self._decode(impatient, self._config.step_rows - for_prompts)
        room = StepRoom(self._config.step_rows, prefill_rows, self._cost, selection, impatient, patience)
        planned += room.fill(prompts, patient)
        running = {p.sequence for p in planned}
        put_off = [c for c in patient if c.sequence not in running]
        holds_ms = min((patience.of(c) for c in put_off), default=math.inf) - STEPS * room.step_ms
        return StepPlan(tuple(planned), frozenset(c.sequence for c in put_off), holds_ms)

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
            planned.append(candidate.planned(picked, selection.expected[i]))
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


def _offer(candidate: Candidate, nodes: SequenceOf[RatedNode], taken: SequenceOf[RatedNode]) -> Offer:
    sequence = candidate.sequence
    tpot_ms, gained = sequence.promise.tpot_ms, -sum(node[0] for node in taken)
    tokens_left = sequence.max_len - len(sequence.tokens)
    if tpot_ms is None:
        return Offer(nodes, tokens_left=tokens_left, taken=len(taken), gained=gained)
    reserve_ms = sequence.promise.reserve_ms(tokens_left)
    return Offer(nodes, candidate.slack_ms, tpot_ms * TPOT_SHARE, tokens_left, len(taken), gained, reserve_ms)
