"""Chooses the verifier for a request: filter, score, pick."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from treeserve_core.acceptance import AcceptanceRule
from treeserve_router.queue import Ticket

# A session's last verifier is worth this much load: affinity must not pile sessions onto a busy verifier.
AFFINITY_BONUS = 0.25


@dataclass(frozen=True)
class VerifierState:
    """What the router knows of a connected verifier. Links to other models never come this far.

    Attributes:
        address: where it listens; unique in a router.
        max_context_tokens: longest prompt plus output.
        max_sequences: sequences it runs at once.
        sequences: sequences it holds, those on their way to it included.
        free_blocks, total_blocks: KV blocks; both 0 before its first report.
        draining: it takes nothing more.
        holding_off: it has just refused a sequence.
        speculators: attached to it.
        acceptance_rules: those it knows.
    """

    address: str
    verifier_id: str
    max_context_tokens: int
    max_sequences: int
    sequences: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    draining: bool = False
    holding_off: bool = False
    speculators: int = 0
    acceptance_rules: frozenset[AcceptanceRule] = frozenset({AcceptanceRule.REPLAY})

    def can_serve(self, ticket: Ticket) -> bool:
        """Whether it could run the request at all, sooner or later."""
        request = ticket.request
        knows_rule = request.limits.acceptance.rule in self.acceptance_rules
        return not self.draining and knows_rule and request.max_total_tokens <= self.max_context_tokens

    @property
    def has_room(self) -> bool:
        """Whether it can start one more sequence now."""
        blocks_left = self.total_blocks == 0 or self.free_blocks > 0
        return not self.holding_off and self.sequences < self.max_sequences and blocks_left

    @property
    def load(self) -> float:
        """Share of its scarcer resource in use, in [0, 1]."""
        kv_use = 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0
        return max(self.sequences / self.max_sequences, kv_use)


def place(ticket: Ticket, verifiers: Iterable[VerifierState]) -> VerifierState | None:
    """The verifier to run a ticket on now, or None if none has room. Ties go to the lowest address."""
    fitting = [v for v in verifiers if v.can_serve(ticket) and v.has_room]
    return min(fitting, key=lambda v: (-_score(ticket, v), v.address), default=None)


def _score(ticket: Ticket, verifier: VerifierState) -> float:
    affinity = AFFINITY_BONUS if verifier.verifier_id == ticket.preferred_verifier else 0.0
    return (1 - verifier.load) + affinity
