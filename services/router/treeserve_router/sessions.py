"""Which verifier a conversation's KV is at, and the number of its newest turn, for all routers that share a Redis."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from treeserve_router.local_table import LocalTable
from treeserve_router.redis_link import RedisLink

_MAX_LOCAL_SESSIONS = 16_384

# KEYS: record. ARGV: TTL in ms. A plain counter can go backwards after a failover; the server's clock cannot be far
# behind it. Numbers are formatted: Lua's own text of large ones lacks digits.
_BEGIN_TURN = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') or 0
local epoch = math.max(stored + 1, now_ms)
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {epoch, redis.call('HGET', KEYS[1], 'verifier_id') or ''}
"""

# KEYS: record. ARGV: TTL in ms, epoch, verifier id. A turn that is not the newest any more changes nothing; one without
# an epoch began while the server was away.
_END_TURN = """
local epoch, stored = tonumber(ARGV[2]), tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') or 0
if epoch > 0 and stored > epoch then return 0 end
if epoch > 0 then redis.call('HSET', KEYS[1], 'epoch', ARGV[2]) end
redis.call('HSET', KEYS[1], 'verifier_id', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""


@dataclass(frozen=True)
class SessionKey:
    """A conversation of a tenant: two tenants may choose the same id."""

    tenant: str
    session_id: str

    @property
    def redis_key(self) -> str:
        """Key of its record. The id is the client's, so it is hashed: no character of it reaches the key."""
        digest = hashlib.sha256(f"{self.tenant} {self.session_id}".encode()).hexdigest()[:32]
        return f"treeserve:{{{digest}}}:session"


@dataclass(frozen=True)
class Turn:
    """A turn of a session.

    Attributes:
        epoch: its number, higher than that of any earlier turn at any router; 0 while nobody counts for all routers.
        verifier_id: where its KV is: of a turn that begins, what ran the one before; of one that ended, what ran it.
            Empty if unknown.
    """

    epoch: int = 0
    verifier_id: str = ""


class Sessions:
    """Session records. Without Redis, or while it is down, this router goes by what it saw itself, and turns have no
    number: only a count that all routers share can tell which turn is the newest.

    Args:
        link: the shared Redis; None for none.
        ttl_s: how long a session is remembered after its last turn.
        clock: seconds, monotonic.
    """

    def __init__(self, link: RedisLink | None, ttl_s: float, clock: Callable[[], float]) -> None:
        self._link = link
        self._ttl_ms = round(ttl_s * 1000)
        self._local: LocalTable[SessionKey, Turn] = LocalTable(ttl_s, _MAX_LOCAL_SESSIONS, clock)
        self._begin = link.script(_BEGIN_TURN) if link is not None else None
        self._end = link.script(_END_TURN) if link is not None else None

    async def begin_turn(self, key: SessionKey) -> Turn:
        """Count a new turn; where the one before ran."""
        known = replace(self._local.get(key) or Turn(), epoch=0)
        if self._link is None or (begin := self._begin) is None:
            return known
        reply = await self._link.ask(lambda _: begin(keys=[key.redis_key], args=[self._ttl_ms]))
        if reply is None:
            return known
        epoch, verifier_id = reply
        if not verifier_id:  # a new session, or the server has lost it
            return replace(known, epoch=int(epoch))
        return Turn(int(epoch), verifier_id.decode())

    def end_turn(self, key: SessionKey, turn: Turn) -> None:
        """Remember where a turn ran, in the background.

        Args:
            turn: with the epoch that `begin_turn` gave it, and the verifier that ran it in the end.
        """
        self._local.put(key, turn)
        if self._link is not None and (end := self._end) is not None:
            args: list[str | int] = [self._ttl_ms, turn.epoch, turn.verifier_id]
            self._link.tell(lambda _: end(keys=[key.redis_key], args=args))
