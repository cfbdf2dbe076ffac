"""The journal of running requests in Redis, from which any router takes one up when the router that ran it is gone.

A record holds the admitted request and its output so far. One task writes all records of a router, a few times a
second; what it could not write it writes later, and a record that the server has lost it writes anew. A record has one
owner, the last router that opened it: an earlier one can neither write nor delete it any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from redis.asyncio import Redis

from treeserve_core.errors import UnavailableError
from treeserve_router.admission import RouterRequest
from treeserve_router.journal_record import JournalEntry, output_fields, parse_record, request_fields
from treeserve_router.redis_link import RedisLink, Script

FLUSH_INTERVAL_S = 0.25
# A larger record, or more of them in one call, might not be written within the time limit of a call.
_MAX_RECORD_BYTES = 1 << 20
_MAX_CALL_RECORDS = 64
# All but the tokens and a grammar: stop strings and logit biases, at most.
_RECORD_OVERHEAD_BYTES = 16 << 10
_TOKEN_BYTES = 4

# KEYS: record. ARGV: owner, TTL in ms. A router takes a request up: from now on the record is its own.
_CLAIM = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: record. ARGV: owner, TTL in ms, 1 to take another's record over, then fields and values. Returns 1, or -1 if the
# record is another's.
_OPEN = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] and ARGV[3] ~= '1' then return -1 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'owner', ARGV[1], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

# KEYS: record. ARGV: owner, TTL in ms, then fields and values, or none to keep it alive. Returns 1, or 0 if the record
# is gone, or -1 if it is another's.
_APPEND = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return 0 end
if owner ~= ARGV[1] then return -1 end
if #ARGV > 2 then redis.call('HSET', KEYS[1], unpack(ARGV, 3)) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_GONE, _TAKEN_OVER = 0, -1

# KEYS: record. ARGV: owner.
_DELETE = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


# How a request ends that a client may take up elsewhere.
_BROKEN_OFF = (UnavailableError, asyncio.CancelledError, GeneratorExit)


class _State(Enum):
    RUNNING = auto()
    LEFT = auto()
    ENDED = auto()


class JournalPage:
    """The record of one request. It runs as long as the page's context lasts; the journal writes in its own time.

    A request that ended, well or badly, is deleted: nobody will ask for it. One that was broken off, because its client
    left or this router could not go on, stays until it expires: the client may come back at any router.

    Args:
        output: its output tokens; more of them appear here as it runs.
        is_kept: whether the journal has room for it. If not, only its client can resume it.
    """

    def __init__(
        self, key: str, owner: str, request: RouterRequest, output: Sequence[int], now: float, *, is_kept: bool
    ) -> None:
        self.key = key
        self.owner = owner
        self.request = request
        self.output = output
        self.is_kept = is_kept
        self.num_written: int | None = None  # output tokens in the record; None if there is none
        self.written_at = now
        self.was_sent = False  # there may be a record of this page
        self.state = _State.RUNNING

    def __enter__(self) -> JournalPage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        broken_off = kind is not None and issubclass(kind, _BROKEN_OFF)
        self.state = _State.LEFT if broken_off else _State.ENDED

    @property
    def size(self) -> int:
        """Bytes the record may grow to."""
        return _size(self.request)

    @property
    def may_exist(self) -> bool:
        """Whether there may be a record, be it the one from which another router's request was taken up."""
        return self.was_sent or self.request.is_taken_up

    @property
    def is_dirty(self) -> bool:
        """Whether the record lacks something."""
        return self.num_written != len(self.output)


@dataclass(frozen=True)
class _Step:
    """One change of a record, after which it has `num_tokens` of output; None if it is deleted."""

    page: JournalPage
    script: Script
    args: list[Any]
    num_tokens: int | None


class Journal:
    """The records of one router.

    Args:
        link: the shared Redis; None keeps no journal.
        scope: the served model: another model's requests are not this router's to take up.
        ttl_s: how long a record outlives its last writing.
        max_bytes: what this router's records may grow to together; a request that exceeds it is not kept.
        clock: seconds, monotonic.
        draw_owner: makes a name for the owner of a record that no other has.
    """

    def __init__(
        self,
        link: RedisLink | None,
        scope: str,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float],
        draw_owner: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._link = link
        self._scope = scope
        self._ttl_s = ttl_s
        self._ttl_ms = round(ttl_s * 1000)
        self._max_bytes = max_bytes
        self._clock = clock
        self._draw_owner = draw_owner
        self._pages: dict[JournalPage, None] = {}
        self._bytes = 0
        # Records that nobody writes any more: when they expire, and their size.
        self._left: deque[tuple[float, int]] = deque()
        self._flushing = asyncio.Lock()
        self._times_found = 0
        if link is not None:
            self._open, self._append, self._delete = map(link.script, (_OPEN, _APPEND, _DELETE))
            self._claim = link.script(_CLAIM)

    async def open(self, request: RouterRequest, output: Sequence[int]) -> JournalPage:
        """Begin the record of a request and its output, or take over that of one that is taken up.

        A request of nobody known is not kept: anybody could ask for it.
        """
        key = self._key(request.tenant, request.request_id)
        room = min(_MAX_RECORD_BYTES, self._max_bytes - self._bytes)
        is_kept = self._link is not None and request.tenant != "" and _size(request) <= room
        page = JournalPage(key, self._draw_owner(), request, output, self._clock(), is_kept=is_kept)
        if not is_kept or self._link is None:
            return page
        self._bytes += page.size
        if request.is_taken_up:
            try:
                await self._link.ask(lambda _: self._claim(keys=[key], args=[page.owner, self._ttl_ms]))
            except BaseException:
                self._bytes -= page.size
                raise
        self._pages[page] = None
        return page

    async def find(self, tenant: str, request_id: str) -> JournalEntry | None:
        """What the journal has of a tenant's request; None if nothing, or if it cannot be had quickly."""
        if self._link is None or not tenant:
            return None
        key = self._key(tenant, request_id)
        fields = await self._link.ask(lambda redis: cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(key)))
        return parse_record(fields) if fields else None

    async def run(self) -> None:
        """Write the records until cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(FLUSH_INTERVAL_S)

    async def flush(self) -> None:
        """Write what is not written yet, keep alive what runs, delete what has ended."""
        async with self._flushing:
            self._forget_idle()
            if self._link is None or not self._link.is_up:
                return
            if self._times_found != self._link.times_found:
                self._times_found = self._link.times_found
                self._doubt_all()
            for steps in _batches([self._step(page) for page in self._pages if self._is_due(page)]):
                replies = await self._link.ask(partial(_send, steps=steps))
                for step, reply in zip(steps, replies or (), strict=False):
                    self._settle(step, reply)

    def _forget_idle(self) -> None:
        """Let go of pages that nothing more is to be written of, and of the room of records that have expired."""
        is_up = self._link is not None and self._link.is_up
        for page in tuple(self._pages):
            never_was = page.state is _State.ENDED and not page.may_exist
            # What another router has ended meanwhile is not to come back.
            has_gone = page.state is _State.LEFT and page.may_exist and page.num_written is None
            if never_was or has_gone or (page.state is not _State.RUNNING and not is_up):
                self._forget(page)
        while self._left and self._left[0][0] <= self._clock():
            self._bytes -= self._left.popleft()[1]

    def _doubt_all(self) -> None:
        """The server was away: see to every record, whether it is still there."""
        for page in self._pages:
            page.written_at = -math.inf

    def _is_due(self, page: JournalPage) -> bool:
        return page.state is _State.ENDED or page.is_dirty or self._clock() - page.written_at > self._ttl_s / 3

    def _step(self, page: JournalPage) -> _Step:
        if page.state is _State.ENDED:
            return _Step(page, self._delete, [page.owner], None)
        if page.num_written is None:
            is_first = page.state is _State.RUNNING and not page.may_exist
            script, args = self._open, [page.owner, self._ttl_ms, int(is_first)]
            fields = request_fields(page.request) | output_fields(0, page.output)
        else:
            script, args = self._append, [page.owner, self._ttl_ms]
            fields = output_fields(page.num_written, page.output[page.num_written :])
        page.was_sent = True
        args += [part for pair in fields.items() for part in pair]
        return _Step(page, script, args, len(page.output))

    def _settle(self, step: _Step, reply: int) -> None:
        page = step.page
        if step.num_tokens is None or reply == _TAKEN_OVER:
            self._forget(page)
            return
        page.num_written = None if reply == _GONE else step.num_tokens
        page.written_at = self._clock()
        if page.state is _State.LEFT and not page.is_dirty:
            self._forget(page)
            self._bytes += page.size
            self._left.append((page.written_at + self._ttl_s, page.size))

    def _forget(self, page: JournalPage) -> None:
        del self._pages[page]
        self._bytes -= page.size

    def _key(self, tenant: str, request_id: str) -> str:
        """Key of a record. It depends on the tenant: nobody finds another's. Hashed, because the id is a client's."""
        digest = hashlib.sha256(f"{self._scope} {tenant} {request_id}".encode()).hexdigest()[:32]
        return f"treeserve:{{{digest}}}:journal"


def _size(request: RouterRequest) -> int:
    grammar = request.sampling.grammar
    grammar_bytes = 0 if grammar is None else grammar.num_bytes
    return _RECORD_OVERHEAD_BYTES + grammar_bytes + _TOKEN_BYTES * request.max_total_tokens


async def _send(redis: Redis, steps: Sequence[_Step]) -> list[int]:
    async with redis.pipeline(transaction=False) as pipe:
        for step in steps:
            await step.script(keys=[step.page.key], args=step.args, client=pipe)
        return await pipe.execute()


def _batches(steps: Sequence[_Step]) -> Iterator[Sequence[_Step]]:
    """The steps by calls, none much larger than the largest record."""
    batch: list[_Step] = []
    size = 0
    for step in steps:
        batch.append(step)
        size += sum(len(part) for part in step.args if isinstance(part, bytes))
        if size > _MAX_RECORD_BYTES or len(batch) == _MAX_CALL_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
