"""What the choice of a sequence's next tokens rests on, for samplers that run elsewhere than `SequenceSampler`."""

from __future__ import annotations

from dataclasses import dataclass

from treeserve_core.sampling import SamplingParams
from treeserve_engine.processors import TokenContext


@dataclass(frozen=True)
class SamplerState:
    """What a sequence's next tokens depend on besides their logits.

    Attributes:
        params: how to choose.
        context: the tokens so far.
        position: of the next token.
        blocked_ids: ids that must not be chosen before position `unblocked_from`.
    """

    params: SamplingParams
    context: TokenContext
    position: int
    blocked_ids: tuple[int, ...]
    unblocked_from: int

    @property
    def is_penalised(self) -> bool:
        """Whether the tokens so far matter."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def edits(self) -> bool:
        """Whether a logit may change before the choice."""
        return self.is_penalised or bool(self.params.logit_bias) or self.position < self.unblocked_from

    @property
    def is_filtered(self) -> bool:
        """Whether not every token may be drawn."""
        p = self.params
        return not p.is_greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)
