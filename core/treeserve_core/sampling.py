"""What a request asks for: how tokens are chosen and when generation ends, with every limit checked here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar
from treeserve_core.preset import Preset

MAX_TOP_LOG_PROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or not (low <= value <= high) or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidArgumentError(name, f"{value} is outside {bracket}{low:g}, {high:g}]")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Defaults leave the model's distribution alone, and temperature 0 is greedy.

    Attributes:
        grammar: what the output's text must be; None for anything.

    Raises:
        InvalidArgumentError: for a value outside the limits that the public API states.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    top_log_probs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check_range("sampling.temperature", self.temperature, 0, 100)
        if self.top_k < 0:
            raise InvalidArgumentError("sampling.top_k", "is negative")
        _check_range("sampling.top_p", self.top_p, 0, 1, open_low=True)
        _check_range("sampling.min_p", self.min_p, 0, 1)
        _check_range("sampling.repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        _check_range("sampling.presence_penalty", self.presence_penalty, -2, 2)
        _check_range("sampling.frequency_penalty", self.frequency_penalty, -2, 2)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidArgumentError("sampling.logit_bias", f"more than {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            _check_range(f"sampling.logit_bias[{token_id}]", bias, -100, 100)
        if not 0 <= self.seed < 2**64:
            raise InvalidArgumentError("sampling.seed", "is not an unsigned 64-bit integer")
        if self.top_log_probs is not None and not 0 <= self.top_log_probs <= MAX_TOP_LOG_PROBS:
            raise InvalidArgumentError("sampling.top_log_probs", f"is outside [0, {MAX_TOP_LOG_PROBS}]")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError if a token id or count does not fit the vocabulary."""
        if self.top_k > vocab_size:
            raise InvalidArgumentError("sampling.top_k", f"is larger than the vocabulary ({vocab_size})")
        check_token_ids("sampling.logit_bias", list(self.logit_bias), vocab_size)

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are chosen by argmax."""
        return self.temperature == 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether the tokens so far matter to the next one's logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class StoppingCriteria:
    """When generation ends. `max_tokens` and `min_tokens` count output tokens.

    Raises:
        InvalidArgumentError: for a value outside the limits that the public API states.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidArgumentError("stopping.max_tokens", "must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgumentError("stopping.min_tokens", f"is outside [0, max_tokens = {self.max_tokens}]")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidArgumentError("stopping.stop_strings", f"more than {MAX_STOP_STRINGS} strings")
        for stop in self.stop_strings:
            if not 0 < len(stop.encode()) <= MAX_STOP_STRING_BYTES:
                raise InvalidArgumentError("stopping.stop_strings", f"each has 1 to {MAX_STOP_STRING_BYTES} bytes")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgumentError("stopping.stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS} ids")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError if a token id does not fit the vocabulary."""
        check_token_ids("stopping.stop_token_ids", self.stop_token_ids, vocab_size)


class ServiceClass(IntEnum):
    """Service classes, most urgent first."""

    REALTIME = 1
    INTERACTIVE = 2
    STANDARD = 3
    BATCH = 4


@dataclass(frozen=True)
class SequenceLimits:
    """What a sequence was promised and how it may speculate, resolved before it reaches a verifier.

    Attributes:
        max_nodes: draft nodes a step may verify for it, the root not counted; 0 switches speculation off, None leaves
            it to the planner.
        ttft_ms, tpot_ms: targets; None for no target.
        acceptance: how drafted tokens are accepted.
        preset: what kind of work the request says it is.
        preemptible: a sequence that is more urgent may pause it.

    Raises:
        InvalidArgumentError: for a value outside the limits that the public API states.
    """

    service_class: ServiceClass = ServiceClass.STANDARD
    max_nodes: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    preset: Preset = Preset.NONE
    preemptible: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidArgumentError(f"service_level.{name}", "must be a positive number")
        if self.max_nodes is not None and self.max_nodes < 0:
            raise InvalidArgumentError("speculation.max_nodes", "is negative")
        if not self.speculates and self.acceptance.rule is not AcceptanceRule.REPLAY:
            raise InvalidArgumentError("speculation.acceptance", "chooses nothing: speculation is disabled")

    @property
    def speculates(self) -> bool:
        """Whether trees may be drafted at all."""
        return self.max_nodes != 0


def check_combination(sampling: SamplingParams, limits: SequenceLimits) -> None:
    """Raise InvalidArgumentError for a grammar under typical acceptance, which compares paths, not tokens."""
    if sampling.grammar is not None and limits.acceptance.rule is AcceptanceRule.TYPICAL:
        raise InvalidArgumentError("sampling.grammar", "cannot be combined with typical acceptance")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgumentError if a token id is not in [0, vocab_size)."""
    if len(token_ids) > 0 and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidArgumentError(name, f"token ids must be in [0, {vocab_size})")
