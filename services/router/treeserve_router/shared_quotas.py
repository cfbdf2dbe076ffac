"""A tenant's quota as all routers count it together: two token buckets and its requests in progress, in Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from treeserve_router.redis_link import RedisLink
from treeserve_router.tenants import TenantPolicy

# A router that has not been heard of for this long is gone, and so are its requests in progress.
LEASE_S = 30.0

# KEYS: what is left in the tenant's two buckets; its requests in progress, by router ("count:expiry").
# ARGV: router, its requests in progress, lease in ms; the quota (0 is no limit): requests a minute, tokens a minute,
#       requests in progress; tokens and requests to charge, below 0 to give back; 1 if a request asks to be admitted.
# Returns the fields of `Answer`.
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local router, own, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local per_minute = {tonumber(ARGV[4]), tonumber(ARGV[5])}
local most, tokens, requests, asks = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == '1'

local others, routers = 0, 1
local counts = redis.call('HGETALL', KEYS[2])
for i = 1, #counts, 2 do
  if counts[i] ~= router then
    local count, expiry = string.match(counts[i + 1], '^(%d+):(%d+)$')
    if expiry and tonumber(expiry) >= now then
      others, routers = others + tonumber(count), routers + 1
    else
      redis.call('HDEL', KEYS[2], counts[i])
    end
  end
end

local names = {'requests', 'tokens'}
local stored = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local at = math.max(tonumber(stored[3] or now), now)
local minutes = (at - tonumber(stored[3] or now)) / 60000
local need = {1, math.min(tokens, per_minute[2])}
local cost = {requests, tokens}
local left = {}
for i = 1, 2 do
  left[i] = math.min(tonumber(stored[i] or per_minute[i]) + minutes * per_minute[i], per_minute[i])
  if asks and per_minute[i] > 0 and left[i] < need[i] then
    return {i, math.ceil((need[i] - left[i]) / per_minute[i] * 60000), routers}
  end
end
if asks and most > 0 and others + own > most then
  return {3, 0, routers}
end

local full_in = 0
for i = 1, 2 do
  if per_minute[i] > 0 then
    left[i] = math.min(left[i] - cost[i], per_minute[i])
    full_in = math.max(full_in, (per_minute[i] - left[i]) / per_minute[i] * 60000)
    redis.call('HSET', KEYS[1], names[i], string.format('%.6f', left[i]))
  end
end
redis.call('HSET', KEYS[1], 'at', string.format('%.0f', at))
redis.call('PEXPIRE', KEYS[1], math.ceil(full_in) + 1000)
redis.call('HSET', KEYS[2], router, string.format('%d:%.0f', own, now + lease))
redis.call('PEXPIRE', KEYS[2], lease)
return {0, 0, routers}
"""


class Answer(NamedTuple):
    """What Redis says of a request.

    Attributes:
        refusing: 0 if it is admitted, else the quota that refuses it: 1 requests, 2 tokens, 3 requests in progress.
        wait_ms: when that quota will have enough; 0 if nobody knows.
        routers: how many routers served the tenant of late.
    """

    refusing: int
    wait_ms: int
    routers: int


class SharedQuotas:
    """Asks and charges on behalf of one router."""

    def __init__(self, link: RedisLink, router_id: str) -> None:
        self._link = link
        self._script = link.script(_SCRIPT)
        self._router_id = router_id

    async def ask(self, tenant: str, policy: TenantPolicy, in_progress: int, tokens: int) -> Answer | None:
        """Admit one more request of so many tokens, or not; None if Redis does not answer.

        Args:
            in_progress: requests of the tenant at this router, with that one.
        """
        answer = await self._link.ask(self._call(tenant, policy, in_progress, tokens, 1, asks=True))
        return None if answer is None else Answer(*answer)

    def tell(self, tenant: str, policy: TenantPolicy, in_progress: int, tokens: int, requests: int) -> None:
        """Charge tokens and requests, or give back what is below 0, and renew the count of requests in progress, in the
        background.
        """
        self._link.tell(self._call(tenant, policy, in_progress, tokens, requests, asks=False))

    def _call(
        self, tenant: str, policy: TenantPolicy, in_progress: int, tokens: int, requests: int, *, asks: bool
    ) -> Callable[[object], Awaitable[list[int]]]:
        tag = "treeserve:{" + (tenant or "nobody") + "}"
        limits = (policy.requests_per_minute, policy.tokens_per_minute, policy.max_in_progress)
        arguments = [self._router_id, in_progress, round(LEASE_S * 1000), *(limit or 0 for limit in limits)]
        arguments += [tokens, requests, int(asks)]
        return lambda _: self._script(keys=[f"{tag}:quota", f"{tag}:in-progress"], args=arguments)
