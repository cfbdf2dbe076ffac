"""What tenants are due: their weights in fair shares, and their quotas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeserve_core.errors import InvalidArgumentError
from treeserve_router.admission import tenant_label
from treeserve_wire.config import merged

# In configuration, this name stands for every tenant that has none of its own there.
EVERYONE_ELSE = "*"


@dataclass(frozen=True)
class TenantPolicy:
    """What holds for one tenant at all routers together. None is no limit.

    Attributes:
        weight: its share of service, relative to other tenants that wait in the same class.
        requests_per_minute: requests that are admitted.
        tokens_per_minute: prompt and output tokens.
        max_in_progress: requests that wait or run at once.

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    weight: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_in_progress: int | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "requests_per_minute", "tokens_per_minute", "max_in_progress"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidArgumentError(name, "must be a number above 0")

    @property
    def has_quota(self) -> bool:
        """Whether anything is limited."""
        return (self.requests_per_minute, self.tokens_per_minute, self.max_in_progress) != (None, None, None)


class Tenants:
    """The policies of all tenants.

    Args:
        by_name: policies by the name that the gateway knows a tenant by; `EVERYONE_ELSE` for the rest, who each have
            one of their own. Requests of nobody known count as one tenant.
    """

    def __init__(self, by_name: Mapping[str, TenantPolicy]) -> None:
        self._rest = by_name.get(EVERYONE_ELSE, TenantPolicy())
        self._by_label = {tenant_label(name): policy for name, policy in by_name.items() if name != EVERYONE_ELSE}

    def policy(self, label: str) -> TenantPolicy:
        """The policy of a tenant, by its label."""
        return self._by_label.get(label, self._rest)

    def weight(self, label: str) -> float:
        """A tenant's weight in fair shares."""
        return self.policy(label).weight


def tenants_from(value: Mapping[str, Any]) -> Mapping[str, TenantPolicy]:
    """Policies from configuration: by tenant, the fields of `TenantPolicy`; those left out are the rest's.

    Raises:
        InvalidArgumentError: for an unknown field, or a value that cannot work.
    """
    rest = merged(TenantPolicy(), value.get(EVERYONE_ELSE), f"tenants.{EVERYONE_ELSE}")
    named = {name: merged(rest, change, f"tenants.{name}") for name, change in value.items()}
    return named | ({EVERYONE_ELSE: rest} if EVERYONE_ELSE in value else {})
