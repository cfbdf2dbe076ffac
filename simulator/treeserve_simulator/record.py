"""What became of one simulated request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from treeserve_simulator.trace import TraceRequest

Outcome = Literal["finished", "shed", "failed"]


@dataclass(frozen=True)
class Record:
    """One request.

    Attributes:
        outcome: "shed" was refused for load, "failed" ended otherwise without an end.
        sent_s: when it was sent: `request.at_s`, or the end of the session's turn before.
        ended_s: when its end, or its refusal, was known.
        first_token_s: None if no token came.
        tokens: output tokens that came.
        cached_tokens: prompt tokens that were not computed because a verifier still held them.
        steps, accepted: of its verify steps.
        replays: times it was queued again.
    """

    request: TraceRequest
    outcome: Outcome
    sent_s: float
    ended_s: float
    first_token_s: float | None = None
    tokens: int = 0
    verifier_id: str = ""
    cached_tokens: int = 0
    steps: int = 0
    accepted: int = 0
    replays: int = 0

    @property
    def ttft_ms(self) -> float | None:
        """From sending it to its first token."""
        return None if self.first_token_s is None else 1e3 * (self.first_token_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token after the first; None with fewer than two."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return 1e3 * (self.ended_s - self.first_token_s) / (self.tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """A line of a results file: the line of the trace and what became of it."""
        return self.request.to_json() | {
            "outcome": self.outcome,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tokens": self.tokens,
            "verifier_id": self.verifier_id,
            "cached_tokens": self.cached_tokens,
            "steps": self.steps,
            "accepted": self.accepted,
            "replays": self.replays,
        }
