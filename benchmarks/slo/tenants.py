"""Two tenants of equal weight, one with ten times the demand of the other, both with requests waiting all the time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.rendered_prompts import Prompts
from benchmarks.slo.load import Record, Submit, keep_busy
from benchmarks.slo.trace import Arrival

LIGHT, HEAVY = "light", "heavy"
# Few places, so that the light tenant's requests wait as well.
SEQUENCES = 8
IN_FLIGHT = {LIGHT: 2 * SEQUENCES, HEAVY: 20 * SEQUENCES}
SETTLE_S = 5.0
_OUTPUT_TOKENS = 48


def make_requests(tenant: str, prompts: Prompts, rng: random.Random) -> Iterator[Arrival]:
    """Requests of one tenant without end, of a class that is made to wait rather than refused."""
    texts = [prompt for ours in prompts.values() for prompt in ours]
    while True:
        yield Arrival(0.0, tenant, "interactive", tenant, rng.choice(texts), _OUTPUT_TOKENS)


async def measure(duration_s: float, prompts: Prompts, submit: Submit, rng: random.Random) -> dict[str, Any]:
    """Let both ask for so long; see `report`."""
    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        tasks = {
            tenant: group.create_task(
                keep_busy(make_requests(tenant, prompts, rng), in_flight, submit, began, duration_s)
            )
            for tenant, in_flight in IN_FLIGHT.items()
        }
    return report({tenant: task.result() for tenant, task in tasks.items()}, duration_s)


def report(records: dict[str, Sequence[Record]], duration_s: float) -> dict[str, Any]:
    """What each tenant was served after the first seconds.

    Returns:
        served_tokens[tenant]: prompt tokens of requests whose first token came, and output tokens; heavy_over_light:
        their ratio; None if the light one got nothing; finished and refused requests of each.
    """
    served = {tenant: sum(map(_served_after_settling, ours)) for tenant, ours in records.items()}
    return {
        "duration_s": duration_s,
        "in_flight": dict(IN_FLIGHT),
        "served_tokens": served,
        "heavy_over_light": served[HEAVY] / served[LIGHT] if served[LIGHT] else None,
        "finished": {t: sum(r.outcome == "finished" for r in ours) for t, ours in records.items()},
        "refused": {t: sum(r.outcome in ("shed", "failed") for r in ours) for t, ours in records.items()},
    }


def _served_after_settling(record: Record) -> int:
    prompt = len(record.arrival.token_ids) if record.chunks and record.chunks[0][0] >= SETTLE_S else 0
    return prompt + record.tokens_between(SETTLE_S, float("inf"))
