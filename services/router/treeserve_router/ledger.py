"""What a router knows of one verifier: what it reports, what was sent to it since, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.identity import ModelIdentity
from treeserve_core.sampling import ServiceClass
from treeserve_router.batcher import blocks_needed
from treeserve_router.latency_model import LatencyModel
from treeserve_router.placement import Backlog, VerifierState
from treeserve_router.queue import Ticket


@dataclass(frozen=True)
class VerifierOffer:
    """What a verifier said of itself in its welcome.

    Attributes:
        max_context_tokens: longest prompt plus output.
        max_sequences: sequences it runs at once.
        dtype: element type of the weights.
        acceptance_rules: those it knows.
        block_size: tokens in a KV block; 0 if it reuses none.
        grammars: it keeps to grammars.
    """

    verifier_id: str
    model: ModelIdentity
    max_context_tokens: int
    max_sequences: int
    dtype: str
    acceptance_rules: frozenset[AcceptanceRule]
    block_size: int = 0
    grammars: bool = False


@dataclass(frozen=True)
class Load:
    """What a verifier reports of itself.

    Attributes:
        sequences: those it holds, of all routers.
        waiting: those of them that do not run.
        free_blocks, total_blocks: KV blocks.
        draining: it takes nothing more.
        speculators: attached to it.
        preemptible: running sequences that a more urgent one may pause.
        step_s, prefill_tokens_per_s: how fast it is; 0 if unknown.
        work_s, drafting_s: what it did since it started, and what speculators spent on its trees; None if unknown.
    """

    sequences: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    draining: bool = False
    speculators: int = 0
    waiting: int = 0
    preemptible: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    work_s: float | None = None
    drafting_s: float | None = None


# Sequences that are late for their first token hold no place: the verifier pauses them for who can be in time. But no
# more than this share of its places: what waits there waits in nobody's turn.
_MOST_LATE = 0.5
# What others' prompts are taken for until there is a prompt of ours, and how fast ours change that.
_TYPICAL_TOKENS = 256.0
_TYPICAL_SMOOTHING = 0.05


@dataclass
class _Sent:
    """A sequence at the verifier.

    Attributes:
        sent_at, late_at: on the clock; when it was sent, and when its target for the first token has passed.
        tokens: prompt tokens it makes the verifier compute.
        tokens_ahead: of those that started before it.
        blocks: KV blocks it needs to start.
        first_at, last_at: when its first and latest tokens came; None before.
        later: tokens that came after the first ones.
    """

    sent_at: float
    late_at: float
    tokens: int
    tokens_ahead: int
    blocks: int
    first_at: float | None = None
    last_at: float = 0.0
    later: int = 0


class VerifierLedger:
    """Keeps the books of one verifier, as long as it stays connected.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, address: str, offer: VerifierOffer, clock: Callable[[], float]) -> None:
        self._address = address
        self._offer = offer
        self._clock = clock
        self._latency = LatencyModel()
        self._load = Load()
        self._sent: dict[Ticket, _Sent] = {}
        self._unreported: set[Ticket] = set()
        self._starting: dict[Ticket, _Sent] = {}
        self._typical_tokens = _TYPICAL_TOKENS
        self._avoid = False
        self._state: VerifierState | None = None  # made when it is asked for, and kept until something changes
        self._stale_at = inf

    @property
    def state(self) -> VerifierState:
        """What placement may know. A report may be older than the last submissions, so those count on top."""
        if self._state is None or self._stale_at <= self._clock():
            self._state = self._make_state()
        return self._state

    def sent(self, ticket: Ticket, waited_s: float = 0.0) -> None:
        """A ticket's sequence went to the verifier, after its request had waited for `waited_s`."""
        state, now, ttft_ms = self.state, self._clock(), ticket.request.limits.ttft_ms
        tokens = state.uncached_tokens(ticket)
        blocks = blocks_needed(ticket, self._offer.block_size) if self._offer.block_size else 0
        late_at = inf if ttft_ms is None else now - waited_s + ttft_ms / 1000
        self._sent[ticket] = _Sent(now, late_at, tokens, state.tokens_before(ticket), blocks)
        self._starting[ticket] = self._sent[ticket]
        self._typical_tokens += _TYPICAL_SMOOTHING * (tokens - self._typical_tokens)
        self._unreported.add(ticket)
        self._state = None

    def tokens(self, ticket: Ticket, count: int) -> bool:
        """Tokens of a ticket came. Returns whether they are its first."""
        sent, now = self._sent[ticket], self._clock()
        sent.last_at = now
        if sent.first_at is not None:
            sent.later += count
            return False
        del self._starting[ticket]
        self._state = None
        sent.first_at = now
        service_class = ticket.request.limits.service_class
        self._latency.first_token(service_class, sent.tokens + sent.tokens_ahead, now - sent.sent_at)
        return True

    def gone(self, ticket: Ticket) -> None:
        """A ticket's sequence is not at the verifier any more, however it went."""
        sent = self._sent[ticket]
        if self._starting.pop(ticket, None) is None and sent.first_at is not None:
            self._latency.ended(sent.later, sent.last_at - sent.first_at)
        del self._sent[ticket]
        self._unreported.discard(ticket)
        self._state = None

    def reported(self, load: Load) -> None:
        """The verifier reported its load."""
        self._load = load
        self._latency.reported(load.step_s, load.prefill_tokens_per_s)
        self._unreported.clear()
        self._state = None

    def avoid(self, avoid: bool) -> None:
        """Placement is to leave the verifier alone, or not any more."""
        self._avoid = avoid
        self._state = None

    def _make_state(self) -> VerifierState:
        load, offer = self._load, self._offer
        return VerifierState(
            address=self._address,
            verifier_id=offer.verifier_id,
            max_context_tokens=offer.max_context_tokens,
            max_sequences=offer.max_sequences,
            sequences=max(load.sequences + len(self._unreported), len(self._sent)) - self._late(),
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            draining=load.draining,
            holding_off=self._avoid,
            speculators=load.speculators,
            acceptance_rules=offer.acceptance_rules,
            grammars=offer.grammars,
            unreported=len(self._unreported),
            others_tokens=self._others_tokens(),
            preemptible=load.preemptible,
            block_size=offer.block_size,
            pending_blocks=sum(sent.blocks for sent in self._starting.values()),
            starting=self._starting_by_urgency(),
            latency=self._latency.now(),
            work_s=load.work_s,
            drafting_s=load.drafting_s,
        )

    def _late(self) -> int:
        """Sequences that are late for their first token, as many as hold no place for that."""
        now = self._clock()
        late = sum(sent.late_at <= now for sent in self._starting.values())
        return min(late, int(_MOST_LATE * self._offer.max_sequences))

    def _others_tokens(self) -> int:
        """Prompt tokens that sequences of other routers may have yet to compute: a guess from how many of them wait."""
        others = max(self._load.sequences - (len(self._sent) - len(self._unreported)), 0)
        return round(min(self._load.waiting, others) * self._typical_tokens)

    def _starting_by_urgency(self) -> tuple[Backlog, ...]:
        """By class, most urgent first: what starts of this class and more urgent ones.

        What is late does not count: the verifier starts it when nothing else is left to start.
        """
        now = self._clock()
        in_time = [(t.request.limits.service_class, sent) for t, sent in self._starting.items() if sent.late_at > now]
        self._stale_at = min((sent.late_at for _, sent in in_time), default=inf)
        backlogs = []
        for service_class in ServiceClass:
            ahead = [sent.tokens for c, sent in in_time if c <= service_class]
            backlogs.append(Backlog(len(ahead), sum(ahead)))
        return tuple(backlogs)
