"""What arrives when: a seeded trace of requests of mixed classes, kinds and lengths, the same for every system."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rendered_prompts import Prompts
from treeserve_client import ServiceClass
from treeserve_core.sampling import ServiceClass as QosClass
from treeserve_simulator.trace import TraceRequest

CLASSES: tuple[ServiceClass, ...] = ("realtime", "interactive", "standard", "batch")
# Above 0 where people want variety.
TEMPERATURES = {"chat": 0.8, "story": 0.8, "code": 0.0, "summary": 0.0, "rewrite": 0.0, "extraction": 0.0}


@dataclass(frozen=True)
class Share:
    """How much of the requests a class makes up, and the least and most output tokens of one."""

    share: float
    output_tokens: tuple[int, int]


MIX: Mapping[ServiceClass, Share] = {
    "realtime": Share(0.15, (16, 48)),
    "interactive": Share(0.35, (32, 96)),
    "standard": Share(0.30, (32, 96)),
    "batch": Share(0.20, (64, 128)),
}


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at_s: when it arrives, in seconds since the trace began.
        kind: the kind of task.
        tenant: whom it is from.
        output_tokens: all of them are generated, past the model's end if need be.
    """

    at_s: float
    kind: str
    service_class: ServiceClass
    tenant: str
    token_ids: tuple[int, ...] = field(repr=False)
    output_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def line(self) -> dict[str, Any]:
        """It as a line of a trace file, which `treeserve simulate` reads."""
        name = QosClass[self.service_class.upper()]
        prompt_tokens = len(self.token_ids)
        return TraceRequest(self.at_s, prompt_tokens, self.output_tokens, name, self.tenant, self.kind).to_json()


def poisson_times(rate: float, window_s: float, rng: random.Random) -> list[float]:
    """Arrival times in [0, window_s) at `rate` a second on average, each independent of the others."""
    times = []
    at_s = rng.expovariate(rate)
    while at_s < window_s:
        times.append(at_s)
        at_s += rng.expovariate(rate)
    return times


def make_trace(
    times: Sequence[float], prompts: Prompts, rng: random.Random, mix: Mapping[ServiceClass, Share] = MIX
) -> list[Arrival]:
    """Requests that arrive at these times, class, kind and length drawn for each.

    There are as many tenants as it takes for none of them to ask the same twice: drafters and caches remember by
    tenant, and would answer a question that comes again from memory.
    """
    kinds = [rng.choice(sorted(prompts)) for _ in times]
    tenants = max((-(-kinds.count(kind) // len(ours)) for kind, ours in prompts.items()), default=1)
    decks = {
        kind: rng.sample(pairs, len(pairs))
        for kind, ours in sorted(prompts.items())
        if (pairs := [(f"tenant-{tenant}", prompt) for tenant in range(tenants) for prompt in ours])
    }
    arrivals = []
    for at_s, kind in zip(times, kinds, strict=True):
        (service_class,) = rng.choices(list(mix), [share.share for share in mix.values()])
        tenant, token_ids = decks[kind].pop()
        arrivals.append(
            Arrival(
                at_s,
                kind,
                service_class,
                tenant,
                token_ids,
                rng.randint(*mix[service_class].output_tokens),
                TEMPERATURES.get(kind, 0.0),
                rng.getrandbits(32),
            )
        )
    return arrivals
