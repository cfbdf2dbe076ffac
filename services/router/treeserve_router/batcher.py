"""How much a verifier is given at a time, and to which class its places are open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket


class Obstacle(StrEnum):
    """Why a verifier that could serve a request is not given it now."""

    HELD_OFF = "a refusal or silence just now"
    NO_PLACE = "no free place"
    RESERVED = "free places for more urgent classes only"
    NO_BLOCKS = "too few free KV blocks"
    STARTING = "enough prompts to start with"


@dataclass(frozen=True)
class BatchLimits:
    """What a verifier may be starting at a time: what was sent and has no token yet.

    More would only wait there, where it can no longer be overtaken by what is more urgent or moved to a verifier that
    becomes free first.

    Attributes:
        min_requests: requests that may be starting whatever the length of their prompts.
        max_requests: most that may be starting.
        max_prefill_s: beyond min_requests, prompts that are computed in this time.
        max_tokens: the same in tokens, for verifiers whose prefill rate is not known.
        high_kv_use: share of the KV blocks in use from which on all this is halved.
    """

    min_requests: int = 8
    max_requests: int = 16
    max_prefill_s: float = 2.0
    max_tokens: int = 4096
    high_kv_use: float = 0.8


class Batcher:
    """Says what stands between a request and a verifier. Has no state of its own.

    Args:
        policies: for the places that each class reserves; a class without one reserves none.
    """

    def __init__(
        self, policies: Mapping[ServiceClass, QosPolicy] = DEFAULT_POLICIES, limits: BatchLimits | None = None
    ) -> None:
        self._limits = limits or BatchLimits()
        own = {c: policies[c].reserved_slots if c in policies else 0 for c in ServiceClass}
        self._reserved = {c: sum(own[urgent] for urgent in ServiceClass if urgent < c) for c in ServiceClass}
        self._has_reserve = frozenset(c for c in ServiceClass if own[c] > 0)

    def obstacle(self, ticket: Ticket, verifier: VerifierState) -> Obstacle | None:
        """Why a ticket cannot go to a verifier that can serve it; None if it can.

        The places and KV blocks of preemptible sequences are as good as free ones to a class that reserves places:
        the verifier pauses one.
        """
        if verifier.holding_off:
            return Obstacle.HELD_OFF
        lacking = self._lacking_place(ticket, verifier) or _lacking_blocks(ticket, verifier)
        if lacking is not None and not self._may_preempt(ticket, verifier):
            return lacking
        return self._too_much_at_once(ticket, verifier)

    def has_room(self, ticket: Ticket, verifier: VerifierState) -> bool:
        """Whether a ticket can go to a verifier that can serve it."""
        return self.obstacle(ticket, verifier) is None

    def passes(self, service_class: ServiceClass, blocked: ServiceClass) -> bool:
        """Whether tickets of a class may be dispatched where one of the other class, before them, waits for room.

        Only if places are kept for them that the other could not have taken: urgent ones start, and one that waited
        long enough to be in front of more urgent ones gets the next place.
        """
        return self._reserved[blocked] > self._reserved[service_class]

    def _lacking_place(self, ticket: Ticket, verifier: VerifierState) -> Obstacle | None:
        if verifier.sequences >= verifier.max_sequences:
            return Obstacle.NO_PLACE
        open_places = max(verifier.max_sequences - self._reserved[ticket.request.limits.service_class], 1)
        return Obstacle.RESERVED if verifier.sequences >= open_places else None

    def _may_preempt(self, ticket: Ticket, verifier: VerifierState) -> bool:
        limits = ticket.request.limits
        urgent = limits.service_class in self._has_reserve and not limits.preemptible
        return urgent and verifier.preemptible > verifier.unreported

    def _too_much_at_once(self, ticket: Ticket, verifier: VerifierState) -> Obstacle | None:
        """What is less urgent does not count: the verifier starts it later."""
        limits = self._limits
        service_class = ticket.request.limits.service_class
        ahead = verifier.ahead_of(service_class)
        per_token_s = verifier.latency.seconds_per_token(service_class)
        max_tokens = limits.max_tokens if per_token_s is None else limits.max_prefill_s / per_token_s
        share = 0.5 if verifier.kv_use >= limits.high_kv_use else 1.0
        if ahead.requests < limits.min_requests * share:
            return None
        fits = ahead.tokens + verifier.uncached_tokens(ticket) <= max_tokens * share
        return None if fits and ahead.requests < limits.max_requests * share else Obstacle.STARTING


def blocks_needed(ticket: Ticket, block_size: int) -> int:
    """KV blocks a ticket takes when it starts, and one to grow into."""
    return -(-ticket.num_tokens // block_size) + 1


def _lacking_blocks(ticket: Ticket, verifier: VerifierState) -> Obstacle | None:
    if verifier.total_blocks == 0 or verifier.sequences == 0:
        return None
    free = verifier.free_blocks - verifier.pending_blocks
    needed = blocks_needed(ticket, verifier.block_size) if verifier.block_size else 1
    return Obstacle.NO_BLOCKS if free < needed else None
