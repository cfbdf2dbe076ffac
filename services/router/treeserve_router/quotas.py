"""Tenants' quotas: requests and tokens a minute, and requests in progress, at all routers together.

While Redis is away, each router grants by itself the share of a quota that falls to it: the quota divided by the number
of routers that served the tenant when Redis last answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple

from treeserve_core.errors import OverloadedError
from treeserve_router.shared_quotas import SharedQuotas
from treeserve_router.tenants import TenantPolicy, Tenants

# Output tokens gather for this long before they are charged; requests in progress are told again this often.
_CHARGE_EVERY_S = 1.0
_RENEW_EVERY_S = 10.0
# A tenant that comes back sooner finds how many routers serve it.
_FORGET_AFTER_S = 60.0
# Nobody knows when one of the requests in progress ends.
_IN_PROGRESS_RETRY_S = 1.0
# By `Answer.refusing`.
_REFUSALS = (
    ("", ""),
    ("quota_requests", "requests a minute"),
    ("quota_tokens", "tokens a minute"),
    ("quota_in_progress", "requests in progress"),
)


@dataclass(eq=False)
class _Bucket:
    """What is left of a number that refills every minute; `at` in seconds on the router's clock."""

    left: float
    at: float

    def refill(self, per_minute: float, now: float) -> None:
        self.left = min(self.left + (now - self.at) / 60 * per_minute, per_minute)
        self.at = now

    def take(self, cost: float, *, may_owe: bool) -> float:
        """Take what it costs, or without debt as much of it as is there; how much that was."""
        taken = cost if may_owe else min(cost, max(self.left, 0.0))
        self.left -= taken
        return taken

    def wait_s(self, need: float, per_minute: float) -> float:
        """Until `need` is there, or all that ever will be; 0 if it is."""
        return max(min(need, per_minute) - self.left, 0.0) / per_minute * 60


class _Grant(NamedTuple):
    """What one request took when it was admitted.

    Attributes:
        by_redis: Redis granted and charged it.
        tokens: of its prompt.
        taken: from this router's share of requests and of tokens.
    """

    by_redis: bool
    tokens: int
    taken: tuple[float, float]


@dataclass(eq=False)
class _Account:
    """What this router knows of a tenant with a quota.

    Attributes:
        in_progress: its requests here.
        uncharged: tokens that Redis was not told yet: output, less what is given back.
        returned: requests that are given back, of which Redis was not told yet.
        told_at: when Redis was told last, or asked.
        is_alone: Redis did not answer when it was asked last.
        routers: how many routers served it when Redis last answered.
        buckets: this router's share of requests and tokens, kept up all the time.
    """

    policy: TenantPolicy
    buckets: tuple[_Bucket, _Bucket]
    in_progress: int = 0
    uncharged: int = 0
    returned: int = 0
    told_at: float = 0.0
    is_alone: bool = False
    routers: int = 1

    @classmethod
    def full(cls, policy: TenantPolicy, routers: int, now: float) -> _Account:
        """Nothing was used yet."""
        requests, tokens = policy.requests_per_minute or 0.0, policy.tokens_per_minute or 0.0
        return cls(policy, (_Bucket(requests, now), _Bucket(tokens, now)), routers=routers)

    def is_full(self, now: float) -> bool:
        """Whether nothing is used, so that forgetting it changes nothing."""
        for bucket, per_minute in zip(self.buckets, self._shares(), strict=True):
            if per_minute is not None:
                bucket.refill(per_minute, now)
                if bucket.left < per_minute:
                    return False
        return self.in_progress == 0

    def refusal(self, tokens: int, now: float) -> tuple[int, float]:
        """Which quota refuses a request by this router's share, and for how long; (0, 0) for none."""
        for i, (need, per_minute) in enumerate(zip((1, tokens), self._shares(), strict=True)):
            if per_minute is not None:
                self.buckets[i].refill(per_minute, now)
                if (wait_s := self.buckets[i].wait_s(need, per_minute)) > 0:
                    return i + 1, wait_s
        most = self.policy.max_in_progress
        return (3, 0.0) if most is not None and self.in_progress > max(most // self.routers, 1) else (0, 0.0)

    def charge(self, requests: int, tokens: int, now: float) -> tuple[float, float]:
        """Take from this router's share; how much of each. What Redis grants is everybody's: it leaves no debt here."""
        taken = [0.0, 0.0]
        for i, (cost, per_minute) in enumerate(zip((requests, tokens), self._shares(), strict=True)):
            if per_minute is not None:
                self.buckets[i].refill(per_minute, now)
                taken[i] = self.buckets[i].take(cost, may_owe=self.is_alone)
        return taken[0], taken[1]

    def give_back(self, grant: _Grant) -> None:
        """A request that was admitted came to nothing."""
        for bucket, taken in zip(self.buckets, grant.taken, strict=True):
            bucket.left += taken
        if grant.by_redis:
            self.uncharged -= grant.tokens
            self.returned += 1

    def _shares(self) -> tuple[float | None, float | None]:
        quotas = self.policy.requests_per_minute, self.policy.tokens_per_minute
        requests, tokens = (None if quota is None else quota / self.routers for quota in quotas)
        return requests, tokens


class Quotas:
    """Admits requests within their tenants' quotas. A tenant without a quota costs nothing.

    A request is charged with itself and its prompt when it is admitted, and with output tokens as they come: a bucket
    may end below zero, and then what comes next waits longer. A prompt of more tokens than a minute gives needs a full
    bucket. A request that is refused after all (the queue is full, it would be late, verifiers are busy) is given back
    itself and its prompt.

    Args:
        shared: None without Redis.
        clock: seconds, monotonic.
    """

    def __init__(self, tenants: Tenants, shared: SharedQuotas | None, clock: Callable[[], float]) -> None:
        self._tenants = tenants
        self._shared = shared
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._routers = 1  # by the last answer for any tenant

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: str, prompt_tokens: int, *, is_resumed: bool = False) -> AsyncIterator[None]:
        """A request of a tenant (its label) is in progress inside the context.

        Args:
            is_resumed: another router admitted it, so it is neither charged again nor refused.

        It is given back what it was charged with if the context raises OverloadedError.

        Raises:
            OverloadedError: if a quota refuses it.
        """
        policy = self._tenants.policy(tenant)
        if not policy.has_quota:
            yield
            return
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account.full(policy, self._routers, self._clock())
        account.in_progress += 1
        try:
            grant = None if is_resumed else await self._admit(tenant, account, prompt_tokens)
        except BaseException:
            account.in_progress -= 1
            raise
        try:
            yield
        except OverloadedError:
            if grant is not None:
                account.give_back(grant)
            raise
        finally:
            account.in_progress -= 1
            if policy.max_in_progress is not None:
                self._tell(tenant, account)

    def charge(self, tenant: str, tokens: int) -> None:
        """Output tokens came for a tenant (its label)."""
        if (account := self._accounts.get(tenant)) is not None:
            account.uncharged += tokens
            account.charge(0, tokens, self._clock())

    async def run(self) -> None:
        """Keep Redis up to date until cancelled."""
        while True:
            await asyncio.sleep(_CHARGE_EVERY_S)
            self.settle()

    def settle(self) -> None:
        """Tell Redis what it does not know yet, and forget tenants that have used nothing of late."""
        now = self._clock()
        for tenant, account in list(self._accounts.items()):
            is_due = account.in_progress > 0 and now - account.told_at >= _RENEW_EVERY_S
            if account.uncharged or account.returned or is_due:
                self._tell(tenant, account)
            elif now - account.told_at >= _FORGET_AFTER_S and account.is_full(now):
                del self._accounts[tenant]

    async def _admit(self, tenant: str, account: _Account, prompt_tokens: int) -> _Grant:
        answer = None
        if self._shared is not None:
            account.told_at = self._clock()
            answer = await self._shared.ask(tenant, account.policy, account.in_progress, prompt_tokens)
        now = self._clock()
        account.is_alone = answer is None
        if answer is None:
            refusing, wait_s = account.refusal(prompt_tokens, now)
        else:
            account.routers = self._routers = answer.routers
            refusing, wait_s = answer.refusing, answer.wait_ms / 1000
        if refusing:
            cause, what = _REFUSALS[refusing]
            raise OverloadedError(f"the tenant's quota of {what} is used up", wait_s or _IN_PROGRESS_RETRY_S, cause)
        return _Grant(answer is not None, prompt_tokens, account.charge(1, prompt_tokens, now))

    def _tell(self, tenant: str, account: _Account) -> None:
        """Charge what gathered. What gathers while Redis is away is charged to this router's share alone."""
        tokens, account.uncharged = account.uncharged, 0
        returned, account.returned = account.returned, 0
        account.told_at = self._clock()
        if self._shared is not None:
            self._shared.tell(tenant, account.policy, account.in_progress, tokens, -returned)
