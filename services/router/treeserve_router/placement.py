"""Chooses the verifier for a request: filter, score, pick."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.sampling import ServiceClass
from treeserve_router.latency_model import Latency
from treeserve_router.queue import Ticket

# Every part of a score is in seconds. What a verifier at full load costs, compared to an idle one:
_LOAD_S = 1.0
# A session's last verifier is worth this much: affinity must not pile sessions onto a busy verifier.
_AFFINITY_S = 0.25
# A verifier whose tokens take longer than those of the fastest by more than this share is slow: it is charged the
# excess for so many tokens.
_SLOW_SHARE = 0.25
_SLOW_TOKENS = 100
# For verifiers whose prefill rate is not known.
_NOMINAL_SECONDS_PER_TOKEN = 0.0005


class Backlog(NamedTuple):
    """Requests that were sent and have no token yet, and the prompt tokens they make the verifier compute."""

    requests: int = 0
    tokens: int = 0


_NO_BACKLOG = (Backlog(),) * len(ServiceClass)


@dataclass(frozen=True)
class VerifierState:
    """What the router knows of a connected verifier. Links to other models or protocols never come this far.

    Attributes:
        address: where it listens; unique in a router.
        max_context_tokens: longest prompt plus output.
        max_sequences: sequences it runs at once.
        sequences: sequences it holds, those on their way to it included.
        unreported: those of them that its last report cannot have counted.
        others_tokens: prompt tokens that sequences of other routers are guessed to have yet to compute.
        preemptible: running ones that a more urgent one may pause, by its last report.
        block_size: tokens in a KV block; 0 if unknown.
        free_blocks, total_blocks: KV blocks; both 0 before its first report.
        pending_blocks: free blocks that requests without a token yet may still take.
        starting: requests of this router without a token yet: by service class, those at least as urgent.
        latency: how fast it is.
        draining: it takes nothing more.
        holding_off: it has just refused a sequence, or seems dead.
        speculators: attached to it.
        acceptance_rules: those it knows.
        grammars: it keeps to grammars.
        work_s, drafting_s: what it did since it started, and what speculators spent on its trees; None before its first
            report.
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
    unreported: int = 0
    others_tokens: int = 0
    preemptible: int = 0
    block_size: int = 0
    pending_blocks: int = 0
    starting: tuple[Backlog, ...] = _NO_BACKLOG
    latency: Latency = field(default_factory=Latency)
    grammars: bool = False
    work_s: float | None = None
    drafting_s: float | None = None

    def can_serve(self, ticket: Ticket) -> bool:
        """Whether it could run the request at all, sooner or later."""
        request = ticket.request
        able = request.limits.acceptance.rule in self.acceptance_rules and self.grammars >= request.has_grammar
        return not self.draining and able and request.max_total_tokens <= self.max_context_tokens

    @property
    def kv_use(self) -> float:
        """Share of its KV blocks in use, in [0, 1]."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def load(self) -> float:
        """Share of its scarcer resource in use; above 1 if it holds more sequences than it runs at once."""
        return max(self.sequences / self.max_sequences, self.kv_use)

    def ahead_of(self, service_class: ServiceClass) -> Backlog:
        """What it has to start before a request of this class, at least."""
        return self.starting[service_class - 1]

    def uncached_tokens(self, ticket: Ticket) -> int:
        """Prompt tokens that it would have to compute for the request; at least one."""
        return max(ticket.num_tokens - ticket.prefix_tokens.get(self.verifier_id, 0), 1)

    def tokens_before(self, ticket: Ticket) -> int:
        """Prompt tokens that it has to compute before the request's own."""
        return self.ahead_of(ticket.request.limits.service_class).tokens + self.others_tokens

    def ttft_s(self, ticket: Ticket) -> float | None:
        """Time to the request's first token if it is sent now; None if nothing is known."""
        service_class = ticket.request.limits.service_class
        return self.latency.ttft_s(self.tokens_before(ticket) + self.uncached_tokens(ticket), service_class)


class Score(NamedTuple):
    """What a request on a verifier costs, in seconds: the lowest total wins.

    Attributes:
        wait_s: until the step that runs, and the prompts before it, are done.
        prefill_s: its own prompt, without what the verifier holds already.
        load_s: what sharing the verifier costs.
        slow_s: what its tokens take longer than the fastest verifier's.
        affinity_s: negative on the verifier that ran its session last.
    """

    wait_s: float
    prefill_s: float
    load_s: float
    slow_s: float
    affinity_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return sum(self)


def place(
    ticket: Ticket, verifiers: Iterable[VerifierState], has_room: Callable[[VerifierState], bool]
) -> VerifierState | None:
    """The verifier to run a ticket on now, or None if none has room. Ties go to the lowest address."""
    fitting = [v for v in verifiers if v.can_serve(ticket) and has_room(v)]
    fastest_s = _fastest_s(fitting)
    return min(fitting, key=lambda v: (score(ticket, v, fastest_s).total_s, v.address), default=None)


def rank(ticket: Ticket, verifiers: Iterable[VerifierState]) -> list[tuple[VerifierState, Score]]:
    """Verifiers that fit, with what they cost, the best first: `place` chooses its first."""
    fitting = list(verifiers)
    fastest_s = _fastest_s(fitting)
    scored = [(verifier, score(ticket, verifier, fastest_s)) for verifier in fitting]
    return sorted(scored, key=lambda each: (each[1].total_s, each[0].address))


def score(ticket: Ticket, verifier: VerifierState, fastest_token_s: float) -> Score:
    """What a ticket costs on a verifier.

    Args:
        fastest_token_s: time per output token of the fastest verifier that fits; 0 if unknown.
    """
    latency = verifier.latency
    service_class = ticket.request.limits.service_class
    seconds_per_token = latency.seconds_per_token(service_class) or _NOMINAL_SECONDS_PER_TOKEN
    excess_s = (latency.token_s or 0.0) - fastest_token_s * (1 + _SLOW_SHARE)
    return Score(
        wait_s=latency.start_s(service_class) + verifier.tokens_before(ticket) * seconds_per_token,
        prefill_s=verifier.uncached_tokens(ticket) * seconds_per_token,
        load_s=_LOAD_S * verifier.load,
        slow_s=_SLOW_TOKENS * max(excess_s, 0.0),
        affinity_s=-_AFFINITY_S if verifier.verifier_id == ticket.preferred_verifier else 0.0,
    )


def _fastest_s(verifiers: Iterable[VerifierState]) -> float:
    return min((t for v in verifiers if (t := v.latency.token_s) is not None), default=0.0)
