"""The way to Redis that all shared state of a router takes: a time limit on every call, and a breaker.

Everything kept there is a hint or can be had again, so a call never raises and never takes long: it answers None. The
first failure opens the breaker: from then on calls return at once, and only the heartbeat in the background finds out
whether the server is back.

Every key has a TTL and a hash tag, and a script takes keys of one tag only, so that a cluster can spread them. Time in
scripts is the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

HEARTBEAT_S = 5.0
# While the server is away, the heartbeat looks for it this often.
_SEARCH_S = 0.5
# Calls beyond this many wait for one another.
_MAX_CONNECTIONS = 16
# Writes in the background beyond this many are dropped: the server is too slow to be worth waiting for.
_MAX_PENDING_WRITES = 1024

Script = Callable[..., Awaitable[Any]]
_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


class RedisLink:
    """One server, Redis or Valkey. Replies are numbers and bytes, never str.

    Args:
        url: redis://, rediss:// or unix:// URL.
        observe_s: takes the seconds each call took.
        call_timeout_s: longest time a call may take, waiting for a connection included.
    """

    def __init__(self, url: str, observe_s: Callable[[float], None], call_timeout_s: float) -> None:
        # No time limit of the client's own on reads and writes: its wait_for can swallow a cancellation (Python 3.11).
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=call_timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = Redis.from_pool(pool)
        self._observe_s = observe_s
        self._call_timeout_s = call_timeout_s
        self._state: bool | None = None  # whether the last call succeeded; None before the first
        self._writes: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()
        self.times_found = 0  # how often the server was found, at first or again: it may have lost everything before

    @property
    def is_up(self) -> bool:
        """Whether the server answered the last call."""
        return self._state is True

    def script(self, source: str) -> Script:
        """A Lua script, to be called as `script(keys=[...], args=[...])` inside `ask`, `tell` or a heartbeat."""
        return self._redis.register_script(source)

    async def ask(self, call: Callable[[Redis], Awaitable[_T]]) -> _T | None:
        """The call's result; None if the server is down, fails, or does not answer within the time limit."""
        return await self._guarded(call) if self.is_up else None

    def tell(self, call: Callable[[Redis], Awaitable[object]]) -> None:
        """Make a call in the background; dropped while the server is down or far behind."""
        if not self.is_up or len(self._writes) >= _MAX_PENDING_WRITES:
            return
        task = asyncio.create_task(_finish(self.ask(call)))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def run_heartbeat(self, beat: Callable[[Redis], Awaitable[object]], interval_s: float = HEARTBEAT_S) -> None:
        """Make the call again and again until cancelled; its success closes the breaker."""
        while True:
            self._lost.clear()
            await self._guarded(beat)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._lost.wait()
            if not self.is_up:
                await asyncio.sleep(min(interval_s, _SEARCH_S))

    async def close(self) -> None:
        """Finish pending writes and disconnect."""
        await asyncio.gather(*self._writes)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _guarded(self, call: Callable[[Redis], Awaitable[_T]]) -> _T | None:
        """The call's result, or None if it fails or takes too long; either way the breaker learns of it."""
        try:
            async with self._timed():
                result = await call(self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            if self._state is not False:
                _log.warning("redis lost", reason=str(error) or type(error).__name__)
            self._state = False
            self._lost.set()
            return None
        if not self._state:
            _log.info("redis connected")
            self.times_found += 1
        self._state = True
        return result

    @contextlib.asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                yield
        finally:
            self._observe_s(clock() - started)


async def _finish(call: Awaitable[object]) -> None:
    await call
