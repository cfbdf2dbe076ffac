"""Which rows run in the next step: a prefill chunk or a pruned tree for each sequence, under one row budget."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from treeserve_core.tree import TokenTree
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.sequence import Sequence


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
    """

    sequence: Sequence
    chunk: int
    tree: TokenTree | None
    expected: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return self.chunk + (len(self.tree) - 1 if self.tree is not None else 0)


@dataclass(frozen=True)
class StepPlan:
    """What one step runs, in order."""

    sequences: tuple[PlannedSequence, ...]

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return sum(planned.rows for planned in self.sequences)


class StepPlanner:
    """Chooses the rows of each step. It keeps no state of its own.

    Every decoding sequence gets its root. Draft nodes are then taken in order of expected acceptance f (path
    probability times the sequence's calibration) as long as they raise emitted tokens per unit time:
    n* = argmax over n of (roots + sum of the n largest f) / t(roots + n). f falls along a path, so parents always come
    first. Zero nodes is a legal answer. Prefill takes what is left of the row budget; nodes leave it `prefill_rows`.
    """

    def __init__(self, config: VerifierConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost

    def draft_budget(self, sequence: Sequence, running: int) -> int:
        """Nodes a drafter should draw for the sequence, the root not counted."""
        limit = sequence.submission.limits.max_nodes
        share = (self._config.step_rows - running) // max(running, 1)
        if sequence.max_len - len(sequence.tokens) <= 1:  # the bonus token alone finishes it
            return 0
        return max(0, min(self._config.max_nodes, share, self._config.max_nodes if limit is None else limit))

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
        nodes: list[tuple[float, int, int, int]] = []  # (-f, depth, candidate, node)
        for index, candidate in enumerate(decoding):
            if candidate.tree is not None:
                nodes += self._rated_nodes(candidate, candidate.tree, index)
        nodes.sort()
        chosen: list[set[int]] = [set() for _ in decoding]
        expected = [0.0] * len(decoding)
        nodes = nodes[: max(0, max_rows - len(decoding))]
        for negative_f, _, index, node in nodes[: self._paying(len(decoding), [-n[0] for n in nodes])]:
            chosen[index].add(node)
            expected[index] -= negative_f
        return [
            PlannedSequence(
                c.sequence,
                1,
                TokenTree.root_only(c.sequence.tokens[-1]) if c.tree is None else c.tree.subtree(picked),
                value,
            )
            for c, picked, value in zip(decoding, chosen, expected, strict=True)
        ]

    def _rated_nodes(self, candidate: Candidate, tree: TokenTree, index: int) -> list[tuple[float, int, int, int]]:
        sequence = candidate.sequence
        depth_left = sequence.max_len - len(sequence.tokens) - 1
        limit = sequence.submission.limits.max_nodes
        pruned = sorted(range(1, len(tree)), key=lambda i: (-tree.path_log_probs[i], tree.depths[i], i))
        rated = [
            (-min(1.0, sequence.calibration * math.exp(tree.path_log_probs[i])), tree.depths[i], index, i)
            for i in pruned
            if tree.depths[i] <= depth_left
        ]
        return rated if limit is None else rated[:limit]

    def _paying(self, roots: int, f: SequenceOf[float]) -> int:
        """How many of the nodes, best first, maximise emitted tokens per unit time."""
        best, best_rate, emitted = 0, 0.0, float(roots)
        for n in range(len(f) + 1):
            if n > 0:
                emitted += f[n - 1]
            rate = emitted / self._cost.step_ms(roots + n)
            if rate > best_rate:
                best, best_rate = n, rate
        return best
