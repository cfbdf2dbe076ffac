"""How a request's drafted tokens are accepted: the rule and its parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from treeserve_core.errors import InvalidArgumentError

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


class AcceptanceRule(IntEnum):
    """Acceptance rules. Only REPLAY gives the tokens of plain decoding; at temperature 0 all give the same.

    REPLAY: the sampler is replayed along the tree.
    MULTI_STEP: SpecInfer's multi-step speculative sampling: the distribution of plain decoding, not its tokens.
    TYPICAL: tokens that are probable enough pass: lossy, another distribution.
    """

    REPLAY = 1
    MULTI_STEP = 2
    TYPICAL = 3

    @property
    def label(self) -> str:
        """The name in requests, responses, metrics and logs."""
        return self.name.lower()

    @property
    def is_lossy(self) -> bool:
        """Whether the output follows another distribution than the target model's."""
        return self is AcceptanceRule.TYPICAL


@dataclass(frozen=True)
class Acceptance:
    """A rule and, for TYPICAL, how probable a drafted token must be: more than min(epsilon, delta * exp(-entropy)).

    Raises:
        InvalidArgumentError: for a value outside (0, 1].
    """

    rule: AcceptanceRule = AcceptanceRule.REPLAY
    epsilon: float = TYPICAL_EPSILON
    delta: float = TYPICAL_DELTA

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0.0 < value <= 1.0):
                raise InvalidArgumentError(f"speculation.typical_{name}", f"{value} is outside (0, 1]")

    @classmethod
    def of(cls, rule: AcceptanceRule, epsilon: float | None, delta: float | None) -> Acceptance:
        """The rule as a request names it; None for a parameter it leaves out.

        Raises:
            InvalidArgumentError: for a value outside its limits, or a parameter that the rule does not have.
        """
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if value is not None and rule is not AcceptanceRule.TYPICAL:
                raise InvalidArgumentError(f"speculation.typical_{name}", "belongs to acceptance = typical")
        return cls(rule, TYPICAL_EPSILON if epsilon is None else epsilon, TYPICAL_DELTA if delta is None else delta)
