"""Hints shared between routers in Redis: worker leases and session records. Losing them costs affinity, never a token.

Every key has a TTL and a hash tag, every call a short time limit. The first failure opens a breaker: from then on calls
return at once, and only the heartbeat in the background finds out whether the server is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

CALL_TIMEOUT_S = 0.1
HEARTBEAT_S = 5.0
LEASE_TTL_S = 30.0

# A plain counter can go backwards after a failover; the server's clock cannot be far behind it.
_REMEMBER_SESSION = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local epoch = math.max(stored + 1, now_ms)
redis.call('HSET', KEYS[1], 'verifier_id', ARGV[1], 'committed_len', ARGV[2], 'epoch', string.format('%.0f', epoch))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return epoch
"""

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SessionRecord:
    """What is remembered of a conversation.

    Attributes:
        verifier_id: the verifier that ran it last.
        committed_len: its length in tokens there, prompt and output.
        epoch: grows with every write; a fence against older writers.
    """

    verifier_id: str
    committed_len: int
    epoch: int


class SessionStore(Protocol):
    """Where sessions are remembered. Nothing here raises or takes long."""

    async def session(self, session_id: str) -> SessionRecord | None:
        """The session's record, if there is one and it can be had quickly."""

    def remember_session(self, session_id: str, verifier_id: str, committed_len: int) -> None:
        """Write the session's record, in the background."""


class NoStore:
    """Remembers nothing: the router without Redis."""

    async def session(self, session_id: str) -> SessionRecord | None:
        """None."""
        return None

    def remember_session(self, session_id: str, verifier_id: str, committed_len: int) -> None:
        """Nothing."""


class RedisStore:
    """Session records and worker leases in Redis or Valkey.

    Args:
        url: redis://, rediss:// or unix:// URL.
        session_ttl_s: how long a session is remembered.
        observe_s: takes the seconds each call took.
    """

    def __init__(self, url: str, session_ttl_s: float, observe_s: Callable[[float], None]) -> None:
        self._redis = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._remember = self._redis.register_script(_REMEMBER_SESSION)
        self._session_ttl_ms = round(session_ttl_s * 1000)
        self._observe_s = observe_s
        self._state: bool | None = None  # whether the last call succeeded; None before the first
        self._writes: set[asyncio.Task[None]] = set()

    @property
    def is_up(self) -> bool:
        """Whether the server answered the last call."""
        return self._state is True

    async def session(self, session_id: str) -> SessionRecord | None:
        """The session's record, if there is one and the server answers within the time limit."""
        if not self.is_up:
            return None
        key = _session_key(session_id)
        fields = await self._soft(lambda: cast("Awaitable[dict[str, str]]", self._redis.hgetall(key)))
        return _record(fields) if fields else None

    def remember_session(self, session_id: str, verifier_id: str, committed_len: int) -> None:
        """Write the session's record in the background; dropped while the server is down."""
        if not self.is_up:
            return
        arguments: list[str | int] = [verifier_id, committed_len, self._session_ttl_ms]
        call = self._soft(lambda: self._remember(keys=[_session_key(session_id)], args=arguments))
        task = asyncio.create_task(_finish(call))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def run_heartbeat(self, leases: Callable[[], Mapping[str, str]], interval_s: float = HEARTBEAT_S) -> None:
        """Renew the leases and close the breaker when the server answers, until cancelled.

        Args:
            leases: verifier id to address of the verifiers this router is connected to now.
        """
        while True:
            await self._soft(lambda: self._renew(leases()))
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        """Finish pending writes and disconnect."""
        await asyncio.gather(*self._writes)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _renew(self, leases: Mapping[str, str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.ping()
            for verifier_id, address in leases.items():
                pipe.set(worker_key(verifier_id), address, px=round(LEASE_TTL_S * 1000))
            await pipe.execute()

    async def _soft(self, call: Callable[[], Awaitable[_T]]) -> _T | None:
        """The call's result, or None if it fails or takes too long; either way the breaker learns of it."""
        try:
            async with self._timed():
                result = await call()
        except (RedisError, OSError, TimeoutError) as error:
            if self._state is not False:
                _log.warning("session store lost", reason=str(error) or type(error).__name__)
            self._state = False
            return None
        if not self._state:
            _log.info("session store connected")
        self._state = True
        return result

    @contextlib.asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                yield
        finally:
            self._observe_s(clock() - started)


def worker_key(verifier_id: str) -> str:
    """Key of a verifier's lease; all leases share a slot."""
    return f"treeserve:{{workers}}:{verifier_id}"


def _session_key(session_id: str) -> str:
    """Key of a session's record. The id is the client's, so it is hashed: no character of it reaches the key."""
    digest = hashlib.sha256(session_id.encode()).hexdigest()[:32]
    return f"treeserve:{{{digest}}}:session"


def _record(fields: Mapping[str, str]) -> SessionRecord | None:
    try:
        return SessionRecord(fields["verifier_id"], int(fields["committed_len"]), int(fields["epoch"]))
    except (KeyError, ValueError):  # written by another version
        return None


async def _finish(call: Awaitable[object]) -> None:
    await call
