"""What verification decided, and the counts it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from treeserve_core.acceptance import AcceptanceRule


class FinishReason(IntEnum):
    """Why a generation ended."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3


@dataclass(frozen=True)
class PositionLogProbs:
    """Log-probabilities at one output position: the emitted token's, and the most probable ones, best first."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class VerifyOutcome:
    """One sequence's result of one step.

    Attributes:
        accepted_nodes: tree nodes on the accepted path, root excluded, in order.
        token_ids: emitted tokens: the accepted ones and the bonus token, cut where the request ends.
        finish_reason: set if the request ended within these tokens.
        log_probs: one entry per emitted token if asked for, else empty.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    log_probs: tuple[PositionLogProbs, ...] = ()

    @property
    def walked_nodes(self) -> tuple[int, ...]:
        """Nodes whose logits chose the emitted tokens, in order, the root first: their KV rows stay.

        KV never covers the last committed token, drafted or not: what can be reused later does not depend on it.
        """
        return (0, *self.accepted_nodes)[: len(self.token_ids)]


@dataclass
class SpeculationStats:
    """Running counts of one request and the rule they were made under. accepted excludes roots and bonus tokens."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    acceptance: AcceptanceRule = AcceptanceRule.REPLAY

    def record(self, drafted: int, accepted: int) -> None:
        """Count one verify step."""
        self.add(SpeculationStats(1, drafted, accepted, [1] * accepted))

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of another part of the same request."""
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.accepted_per_depth.extend([0] * (len(other.accepted_per_depth) - len(self.accepted_per_depth)))
        for depth, accepted in enumerate(other.accepted_per_depth):
            self.accepted_per_depth[depth] += accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step: accepted + 1 on average; 0 before the first step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0
