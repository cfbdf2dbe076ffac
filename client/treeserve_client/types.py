"""What a caller gets back: plain frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2
from treeserve_client.errors import Internal

FinishReason = Literal["stop", "length", "cancelled"]
AcceptanceRule = Literal["replay", "multi_step", "typical"]

_ACCEPTANCE_RULES: dict[int, AcceptanceRule] = {common_pb2.ACCEPTANCE_RULE_UNSPECIFIED: "replay"} | {
    common_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.upper()}"): rule for rule in get_args(AcceptanceRule)
}


def acceptance_rule_from_proto(value: int) -> AcceptanceRule:
    """Decode an acceptance rule. Raises Internal for an unknown one, which this client cannot have asked for."""
    if value not in _ACCEPTANCE_RULES:
        raise Internal(f"unknown acceptance rule {value}")
    return _ACCEPTANCE_RULES[value]


@dataclass(frozen=True)
class Started:
    """The request was admitted. With `seed` the same request gives the same tokens, under acceptance by replay."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    acceptance: AcceptanceRule = "replay"


@dataclass(frozen=True)
class PositionLogProbs:
    """Log-probabilities at one output position: the emitted token's, and the most probable ones, best first."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_proto(cls, msg: common_pb2.PositionLogProbs) -> PositionLogProbs:
        """Decode."""
        return cls(msg.chosen.token_id, msg.chosen.log_prob, tuple((top.token_id, top.log_prob) for top in msg.top))


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens; `offset` is the output position of the first. `log_probs` has an entry each if asked for."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[PositionLogProbs, ...] = ()

    @classmethod
    def from_proto(cls, msg: inference_pb2.TokenChunk) -> Chunk:
        """Decode."""
        return cls(msg.offset, tuple(msg.token_ids), msg.text, tuple(map(PositionLogProbs.from_proto, msg.log_probs)))


@dataclass(frozen=True)
class Usage:
    """Token counts. Of the prompt's, `cached_tokens` did not have to be computed: a verifier still held them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did, since the last resume if there was one. Roots and bonus tokens are not counted.

    Attributes:
        steps: verify steps.
        drafted, accepted: draft nodes verified and accepted.
        accepted_per_depth: element d counts nodes accepted at depth d + 1.
        acceptance: the rule in force. Only "replay" gives the tokens of plain decoding.
        lossy: whether the output does not follow the target model's distribution.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    acceptance: AcceptanceRule = "replay"
    lossy: bool = False

    @classmethod
    def from_proto(cls, msg: common_pb2.SpeculationStats) -> SpeculationStats:
        """Decode."""
        depths, rule = tuple(msg.accepted_per_depth), acceptance_rule_from_proto(msg.acceptance)
        return cls(msg.steps, msg.drafted, msg.accepted, depths, rule, msg.lossy)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step: accepted + 1 on average; 0 without a step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Timing:
    """As the client saw it, milliseconds.

    Attributes:
        ttft_ms: from the call to the first token.
        tpot_ms: mean time of each token after the first; 0 with fewer than two tokens.
        e2e_ms: from the call to the end.
    """

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


@dataclass(frozen=True)
class Completion:
    """A finished generation. `stop_string` is the one that ended it, if one did; `request_id` is for `explain`."""

    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[PositionLogProbs, ...]
    finish_reason: FinishReason
    stop_string: str | None
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    request_id: str = ""


@dataclass(frozen=True)
class Model:
    """A served model.

    Attributes:
        max_context_tokens: longest prompt plus output.
        verifiers: how many serve it now.
        dtype: element type of the weights.
        speculators: attached to the verifier that has the fewest.
    """

    name: str
    tokenizer_hash: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    verifiers: int
    dtype: str
    speculators: int = 0

    @classmethod
    def from_proto(cls, msg: inference_pb2.Model) -> Model:
        """Decode."""
        identity = msg.identity
        return cls(
            name=identity.name,
            tokenizer_hash=identity.tokenizer_hash,
            vocab_size=identity.vocab_size,
            eos_token_ids=tuple(identity.eos_token_ids),
            max_context_tokens=msg.max_context_tokens,
            verifiers=msg.verifiers,
            dtype=msg.dtype,
            speculators=msg.speculators,
        )
