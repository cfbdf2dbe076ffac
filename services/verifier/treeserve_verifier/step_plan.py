"""What a step runs: running sequences before planning, and the rows that were planned for them."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from treeserve_core.sampling import ServiceClass
from treeserve_core.tree import TokenTree
from treeserve_verifier.sequence import Sequence


@dataclass(frozen=True)
class Candidate:
    """A running sequence before planning: its tokens without KV, and the tree that waits for it, if any.

    Attributes:
        uncomputed: committed tokens without KV, the root included: 1 while decoding, more while prefilling.
        tree: drafted tree under the present root.
        slack_ms: until its next token, or its first, is due; infinite if that was not promised.
        silent_ms: since its last token; 0 before the first.
    """

    sequence: Sequence
    uncomputed: int
    tree: TokenTree | None = None
    slack_ms: float = math.inf
    silent_ms: float = 0.0

    @property
    def service_class(self) -> ServiceClass:
        """Of its request."""
        return self.sequence.submission.limits.service_class

    @property
    def context(self) -> int:
        """KV positions that are computed."""
        return len(self.sequence.tokens) - self.uncomputed

    def planned(self, nodes: SequenceOf[int] = (), expected: float = 0.0) -> PlannedSequence:
        """Its root, and these nodes of its tree."""
        if self.tree is None:
            root = TokenTree.root_only(self.sequence.tokens[-1])
            return PlannedSequence(self.sequence, 1, root, context=self.context)
        untried = None if nodes else self.tree
        return PlannedSequence(self.sequence, 1, self.tree.subtree(nodes), expected, untried, self.context)

    def chunk(self, rows: int) -> PlannedSequence:
        """The next `rows` of its prompt; with the last of them its root."""
        root = TokenTree.root_only(self.sequence.tokens[-1]) if rows == self.uncomputed else None
        return PlannedSequence(self.sequence, rows, root, context=self.context)


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
    """What one step runs, in order.

    Attributes:
        put_off: sequences that decode but not in this step: they have time to spare, and others need it.
        holds_ms: how long steps like this one may follow each other before one of those must go on.
    """

    sequences: tuple[PlannedSequence, ...]
    put_off: frozenset[Sequence] = frozenset()
    holds_ms: float = math.inf

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
