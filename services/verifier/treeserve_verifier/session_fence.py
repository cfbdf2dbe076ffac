"""Refuses turns of a session that a newer turn has overtaken: routers may be slow, partitioned, or just dead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from treeserve_core.errors import StaleEpochError

# A router that is this late with a turn has long given it up.
FENCE_TTL_S = 3600.0
MAX_FENCED_SESSIONS = 65_536


class SessionFence:
    """The newest turn seen of each session.

    Args:
        clock: seconds, monotonic.
        ttl_s: how long a session is fenced after its last turn.
        max_sessions: most sessions; beyond, the one whose last turn is the oldest is forgotten.
    """

    def __init__(
        self, clock: Callable[[], float], ttl_s: float = FENCE_TTL_S, max_sessions: int = MAX_FENCED_SESSIONS
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._newest: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()  # epoch, expiry; the oldest first

    def __len__(self) -> int:
        return len(self._newest)

    def check(self, tenant: str, session_id: str, epoch: int) -> None:
        """Let a turn pass, and fence off those before it. The same turn may pass again: a replay, or a hedge.

        Args:
            epoch: the turn's number; 0 if nobody counts, which passes and fences nothing.

        Raises:
            StaleEpochError: if a newer turn was seen.
        """
        now = self._clock()
        self._forget_expired(now)
        if not session_id or epoch == 0:
            return
        key = (tenant, session_id)
        newest, _ = self._newest.get(key, (0, 0.0))
        if epoch < newest:
            raise StaleEpochError("a newer turn of the session has begun")
        self._newest[key] = (epoch, now + self._ttl_s)
        self._newest.move_to_end(key)
        if len(self._newest) > self._max_sessions:
            self._newest.popitem(last=False)

    def _forget_expired(self, now: float) -> None:
        while self._newest and next(iter(self._newest.values()))[1] <= now:
            self._newest.popitem(last=False)
