"""What routers tell each other of the requests that came to them: one hash in Redis, a field for each router."""

from __future__ import annotations

from treeserve_router.autoscaling import Demand
from treeserve_router.redis_link import RedisLink

# A router that has not been heard of for this long is gone, and so is its queue.
LEASE_S = 15.0

# KEYS: the hash, by router "offered:begun:waiting:expiry".
# ARGV: router, its three figures as "offered:begun:waiting", lease in ms.
# Returns the sums of the others.
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local sums = {0, 0, 0}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local offered, begun, waiting, expiry = string.match(fields[i + 1], '^(%d+):(%d+):(%d+):(%d+)$')
  if not expiry or tonumber(expiry) < now then
    redis.call('HDEL', KEYS[1], fields[i])
  elseif fields[i] ~= ARGV[1] then
    sums = {sums[1] + offered, sums[2] + begun, sums[3] + waiting}
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. string.format(':%.0f', now + ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return sums
"""


class SharedDemand:
    """Tells and asks on behalf of one router of a model."""

    def __init__(self, link: RedisLink, model_name: str, router_id: str) -> None:
        self._link = link
        self._script = link.script(_SCRIPT)
        self._key = f"treeserve:{{demand}}:{model_name}"
        self._router_id = router_id

    async def swap(self, own: Demand) -> Demand | None:
        """Tell what this router saw, and learn what all others did; None if Redis does not answer."""
        arguments = [self._router_id, f"{own.offered}:{own.begun}:{own.waiting}", round(LEASE_S * 1000)]
        sums = await self._link.ask(lambda _: self._script(keys=[self._key], args=arguments))
        return None if sums is None else Demand(*sums)
