"""Remembers, for the latest requests, what the router decided about each and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from treeserve_core.errors import NotFoundError, PermissionDeniedError
from treeserve_core.sampling import ServiceClass
from treeserve_router.admission import RouterRequest
from treeserve_router.answer_ids import request_id_of
from treeserve_router.placement import Score

_MAX_DECISIONS = 64


class DecisionKind(StrEnum):
    """What can happen to a request, in about this order."""

    QUEUED = "queued"
    REFUSED = "refused"
    BLOCKED = "blocked"
    PLACED = "placed"
    HEDGED = "hedged"
    FIRST_TOKEN = "first token"
    REPLAYED = "replayed"
    ENDED = "ended"


@dataclass(frozen=True)
class Decision:
    """One step of a request's way.

    Attributes:
        at: on the log's clock; of several that were the same, the first.
        reason: for people.
        verifier_id: whom it concerns; empty for none.
        cost: of the verifier that was chosen.
        repeats: how often the same was decided again in a row.
    """

    at: float
    kind: DecisionKind
    reason: str = ""
    verifier_id: str = ""
    cost: Score | None = None
    repeats: int = 0


@dataclass(frozen=True)
class Explanation:
    """A request's way so far.

    Attributes:
        began: when its first decision was made, on the log's clock.
        age_s: time since then.
        decisions: the latest ones, oldest first.
        dropped: how many came before those.
    """

    request_id: str
    router_id: str
    service_class: ServiceClass
    began: float
    age_s: float
    decisions: tuple[Decision, ...]
    dropped: int


class _Record:
    def __init__(self, service_class: ServiceClass, now: float) -> None:
        self.service_class = service_class
        self.began = now
        self.decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)
        self.dropped = 0


class DecisionLog:
    """Decisions of the latest requests; older requests are forgotten.

    Args:
        clock: seconds, monotonic.
        max_requests: requests to remember; 0 remembers nothing.
        router_id: name of the router that decides.
    """

    def __init__(self, clock: Callable[[], float], max_requests: int = 0, router_id: str = "") -> None:
        self._clock = clock
        self._router_id = router_id
        self._max_requests = max_requests
        self._records: dict[tuple[str, str], _Record] = {}  # by tenant and request id

    @property
    def is_on(self) -> bool:
        """Whether anything is remembered: reasons need not be worked out otherwise."""
        return self._max_requests > 0

    def note(
        self,
        request: RouterRequest,
        kind: DecisionKind,
        reason: str = "",
        verifier_id: str = "",
        cost: Score | None = None,
    ) -> None:
        """Add a decision; one that only repeats the last counts there."""
        if not self.is_on:
            return
        now = self._clock()
        record = self._record(request, now)
        decision = Decision(now, kind, reason, verifier_id, cost)
        last = record.decisions[-1] if record.decisions else None
        if last is not None and (last.kind, last.reason, last.verifier_id) == (kind, reason, verifier_id):
            record.decisions[-1] = replace(last, repeats=last.repeats + 1)
            return
        record.dropped += len(record.decisions) == _MAX_DECISIONS
        record.decisions.append(decision)

    def explain(self, request_id: str, tenant: str | None) -> Explanation:
        """What was decided about a request, as it was told by this router alone.

        Args:
            request_id: the request's, or that of its HTTP answer.
            tenant: label of whom asks; others' requests are as unknown as those that never were. None if nobody is
                known.

        Raises:
            NotFoundError: if nothing is known of the request.
            PermissionDeniedError: if nothing is remembered here at all.
        """
        if not self.is_on:
            raise PermissionDeniedError("this router explains nothing: explain_requests is 0")
        record = None
        if tenant is not None and (record := self._records.get((tenant, request_id))) is None:
            request_id = request_id_of(request_id)
            record = self._records.get((tenant, request_id))
        if record is None:
            raise NotFoundError(f"this router knows nothing of request {request_id!r}; another may have run it")
        return Explanation(
            request_id,
            self._router_id,
            record.service_class,
            record.began,
            self._clock() - record.began,
            tuple(record.decisions),
            record.dropped,
        )

    def _record(self, request: RouterRequest, now: float) -> _Record:
        key = (request.tenant, request.request_id)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(request.limits.service_class, now)
            while len(self._records) > self._max_requests:
                del self._records[next(iter(self._records))]
        return record


NO_DECISIONS = DecisionLog(lambda: 0.0)
"""Remembers nothing."""
