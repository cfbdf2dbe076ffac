"""Which verifiers hold the KV of a token prefix, for all routers that share a Redis.

A prefix is looked up by the names of its blocks (treeserve_core.prefix). Not every block is written down: of the blocks
up to the n-th, about 8 log2(n) are landmarks, the same ones for every text, so that a text finds another's landmarks
without knowing where it ended. What is found is at least eight ninths of what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from treeserve_core.prefix import PrefixHash
from treeserve_router.local_table import LocalTable
from treeserve_router.redis_link import RedisLink

# Verifiers remembered for a prefix; with more, the ones that had it longest ago are forgotten.
MAX_VERIFIERS = 8
_MAX_LOCAL_PREFIXES = 65_536

# KEYS: landmarks, the longest prefix first. Returns verifier, index of its longest prefix, verifier, index, ...
_FIND = """
local now = redis.call('TIME')
local now_ms = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
local seen, reply = {}, {}
for i, key in ipairs(KEYS) do
  for _, verifier in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. now_ms, '+inf')) do
    if not seen[verifier] then
      seen[verifier] = true
      reply[#reply + 1] = verifier
      reply[#reply + 1] = i
    end
  end
end
return reply
"""

# KEYS: landmarks. ARGV: TTL in ms, verifier, most verifiers.
_NOTE = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
for _, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now_ms))
  redis.call('ZADD', key, string.format('%.0f', now_ms + ARGV[1]), ARGV[2])
  redis.call('ZREMRANGEBYRANK', key, 0, -1 - ARGV[3])
  redis.call('PEXPIRE', key, ARGV[1])
end
return #KEYS
"""


class PrefixLocations:
    """Prefixes and the verifiers that had them last. Without Redis, or while it is down, what this router saw itself.

    Args:
        link: the shared Redis; None for none.
        ttl_s: how long a verifier is believed to hold a prefix.
        clock: seconds, monotonic.
    """

    def __init__(self, link: RedisLink | None, ttl_s: float, clock: Callable[[], float]) -> None:
        self._link = link
        self._ttl_ms = round(ttl_s * 1000)
        self._local: LocalTable[PrefixHash, tuple[str, ...]] = LocalTable(ttl_s, _MAX_LOCAL_PREFIXES, clock)
        self._find = link.script(_FIND) if link is not None else None
        self._note = link.script(_NOTE) if link is not None else None

    async def find(self, names: Sequence[PrefixHash]) -> Mapping[str, int]:
        """How many blocks of a text each verifier is believed to hold, in one round trip.

        Args:
            names: of the text's prefixes, shortest first (`prefix_hashes`).
        """
        marks = list(reversed(list(landmarks(len(names)))))
        if not marks:
            return {}
        found: Mapping[str, int] = {}
        if self._link is not None and (find := self._find) is not None:
            keys = [_key(names, mark) for mark in marks]
            reply = await self._link.ask(lambda _: find(keys=keys)) or []
            found = {name.decode(): marks[i - 1] for name, i in zip(reply[::2], reply[1::2], strict=True)}
        return found or self._find_locally(names, marks)

    def note(self, names: Sequence[PrefixHash], verifier_id: str) -> None:
        """A verifier holds the KV of a text. Written in the background.

        Args:
            names: of the text's prefixes, shortest first.
        """
        marks = list(landmarks(len(names)))
        for mark in marks:
            others = (each for each in self._local.get(names[mark - 1]) or () if each != verifier_id)
            self._local.put(names[mark - 1], (verifier_id, *others)[:MAX_VERIFIERS])
        if marks and self._link is not None and (note := self._note) is not None:
            keys = [_key(names, mark) for mark in marks]
            self._link.tell(lambda _: note(keys=keys, args=[self._ttl_ms, verifier_id, MAX_VERIFIERS]))

    def _find_locally(self, names: Sequence[PrefixHash], marks: Sequence[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for mark in marks:
            for verifier_id in self._local.get(names[mark - 1]) or ():
                found.setdefault(verifier_id, mark)
        return found


def landmarks(num_blocks: int) -> Iterator[int]:
    """Lengths in blocks at which prefixes are written down, ascending: 1 to 16, then eight to every doubling."""
    mark = 1
    while mark <= num_blocks:
        yield mark
        mark += 1 << max(mark.bit_length() - 4, 0)


def _key(names: Sequence[PrefixHash], mark: int) -> str:
    """Key of a prefix; all prefixes of texts that begin alike share a slot, so that one script can take them."""
    return f"treeserve:{{{names[0].hex()}}}:prefix:{names[mark - 1].hex()}"
