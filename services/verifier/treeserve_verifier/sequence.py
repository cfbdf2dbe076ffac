"""A sequence as the verifier holds it. Only the scheduler and the step that runs it change one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_core.prefix import PrefixHash
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_engine.accept import SequenceSampler
from treeserve_text.assembler import TextAssembler
from treeserve_verifier.promise import Promise


@dataclass(frozen=True)
class Submission:
    """What a router asks for, checked against this verifier's limits before a Sequence is made of it.

    Attributes:
        generated_token_ids: output that exists already (a replay or a resume).
        traceparent: W3C trace context of the request's span; empty for none.
        tenant: label of whom it is for; empty if nobody is known.
        session_id: conversation it belongs to; empty for none. Its KV is kept longer than others'.
        session_epoch: number of this turn of the session, growing; 0 if nobody counts.
        waited_ms: how long the request waited before it came here.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingCriteria
    limits: SequenceLimits
    traceparent: str = ""
    tenant: str = ""
    session_id: str = ""
    session_epoch: int = 0
    waited_ms: float = 0.0


@dataclass(frozen=True)
class Emission:
    """New tokens of a sequence, on their way to its router. `error` and `finish_reason` exclude each other.

    Attributes:
        offset: output position of the first token.
        log_probs: one entry per token if asked for, else empty.
        stop_string: the stop string that ended it, if one did.
        cached_tokens: prompt tokens whose KV was there already when it began.
    """

    offset: int
    token_ids: tuple[int, ...]
    log_probs: tuple[PositionLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    stats: SpeculationStats | None = None
    error: Exception | None = None
    cached_tokens: int = 0


@dataclass(eq=False)
class WaitTime:
    """Time without rows in a step, however often: queued, paused, or passed over. Times are clock seconds."""

    total_s: float = 0.0
    since: float | None = None

    def begin(self, now: float) -> None:
        """It waits from now on, unless it does already."""
        if self.since is None:
            self.since = now

    def end(self, now: float) -> None:
        """It is served."""
        self.total_s = self.so_far(now)
        self.since = None

    def so_far(self, now: float) -> float:
        """All of it, in seconds."""
        return self.total_s if self.since is None else self.total_s + now - self.since


@dataclass(eq=False)
class Sequence:
    """One generation in progress.

    Attributes:
        seq_id: unique in this process; names its KV blocks.
        emit: takes each Emission; must not block.
        tokens: committed tokens, prompt and output. The last one is the root of the next tree: its KV is not computed.
        sampler: replay state; it alone chooses tokens.
        stop_watch: set if the request has stop strings.
        verified: draft nodes that a step with a tree verifies, smoothed.
        calibration: accepted over expected nodes, smoothed: how far the drafters' probabilities hold here.
        cached_tokens: prompt tokens whose KV was there already when it first ran; None before.
        prefix_names: names of the prefixes of `tokens` that fill whole KV blocks, as far as they were asked for.
        promise: its targets, and how it keeps them.
        wait: how long it has waited here.
    """

    seq_id: int
    submission: Submission
    emit: Callable[[Emission], None]
    sampler: SequenceSampler
    stop_watch: TextAssembler | None
    tokens: list[int]
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    cancelled: bool = False
    calibration: float = 1.0
    verified: float = 4.0
    cached_tokens: int | None = None
    span: Span = INVALID_SPAN
    prefix_names: list[PrefixHash] = field(default_factory=list)
    wait: WaitTime = field(default_factory=WaitTime)
    promise: Promise = field(init=False)

    def __post_init__(self) -> None:
        self.promise = Promise(self.submission.limits.ttft_ms, self.submission.limits.tpot_ms)

    @property
    def prompt_len(self) -> int:
        """Length of the prompt."""
        return len(self.submission.prompt_token_ids)

    @property
    def output_len(self) -> int:
        """Output tokens so far, those it was submitted with included."""
        return len(self.tokens) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Longest it can become: prompt and max_tokens."""
        return self.prompt_len + self.submission.stopping.max_tokens

    def stops_at(self, token_id: int) -> bool:
        """Whether a stop string is complete with this next output token."""
        if self.stop_watch is None:
            return False
        self.stop_watch.push([token_id])
        return self.stop_watch.stopped is not None
