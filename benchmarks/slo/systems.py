"""The systems that are compared: treeserve, and two configurations of it that stand for what others do."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.treeserve import FORGETFUL, TENANT_HEADER
from benchmarks.slo.load import Submit, TokenStream
from benchmarks.slo.targets import Targets
from benchmarks.slo.trace import Arrival
from treeserve_client import AsyncClient, GenerateParams

TREESERVE, FIFO, FIXED = "treeserve", "fifo", "fixed"
BASELINES = (FIFO, FIXED)
# Of every cluster: callers say for whom they ask, and are believed.
GATEWAY = (FORGETFUL, "router.trust_clients=true")
FIXED_NODES = 4
# Without promises all requests are of the standard class, which then promises nothing either.
_NO_PROMISES = "router.qos={realtime: {reserved_slots: 0}, standard: {ttft_ms: null, tpot_ms: null, sheddable: false}}"


@dataclass(frozen=True)
class System:
    """One configuration.

    Attributes:
        options: of `treeserve up`, as `benchmarks.local_cluster` takes them.
        promises: whether requests carry their class and targets. Without, the system knows of neither.
    """

    options: tuple[str, ...]
    promises: bool


def make_systems(fixed_nodes: int = FIXED_NODES) -> dict[str, System]:
    """treeserve as it comes; first come first served without speculation; the same with a fixed tree for everyone.

    Args:
        fixed_nodes: draft nodes of each tree of the last, which waits for and verifies all of them at every step.
    """
    plain = ("router.queue_policy=fifo", _NO_PROMISES)
    trees = ("verifier.draft_always=true", f"verifier.max_nodes={fixed_nodes}")
    return {
        TREESERVE: System((), promises=True),
        FIFO: System((*plain, "speculators=0"), promises=False),
        FIXED: System((*plain, *trees), promises=False),
    }


class Clients:
    """Clients of one cluster, one for each tenant, as a gateway that names its callers' tenant. Use inside a loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._by_tenant: dict[str, AsyncClient] = {}

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for client in self._by_tenant.values():
            await client.close()

    def submit(self, arrival: Arrival, targets: Targets | None) -> TokenStream:
        """Send a request.

        Args:
            targets: what is promised; None to promise nothing.
        """
        params: GenerateParams = {
            "token_ids": arrival.token_ids,
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": arrival.temperature,
            "seed": arrival.seed,
        }
        if targets is not None:
            target = targets[arrival.service_class]
            params |= {
                "service_class": arrival.service_class,
                "ttft_ms": target.ttft_ms,
                "tpot_ms": target.tpot_ms,
            }
        return self._of(arrival.tenant).generate(**params)

    def submitter(self, targets: Targets | None) -> Submit:
        """`submit` with these targets."""
        return lambda arrival: self.submit(arrival, targets)

    def _of(self, tenant: str) -> AsyncClient:
        """The tenant's client; one that names nobody for the tenant ""."""
        if tenant not in self._by_tenant:
            metadata = ((TENANT_HEADER, tenant),) if tenant else ()
            self._by_tenant[tenant] = AsyncClient(self._address, metadata=metadata)
        return self._by_tenant[tenant]
