"""Batch work under more urgent load than the system can bear: does it go on?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.rendered_prompts import Prompts
from benchmarks.slo.load import Record
from benchmarks.slo.trace import MIX, Arrival, Share, make_trace, poisson_times
from treeserve_client import ServiceClass
from treeserve_simulator.percentiles import percentiles

URGENT_LOAD, BATCH_LOAD = 1.2, 0.2  # times what saturates the system
WINDOW_S = 10.0


def make_overload(capacity: float, duration_s: float, prompts: Prompts, rng: random.Random) -> list[Arrival]:
    """More urgent requests than can be served, and batch requests beside them; of no tenant.

    Args:
        capacity: requests a second that saturate the system.
    """
    urgent: Mapping[ServiceClass, Share] = {name: share for name, share in MIX.items() if name != "batch"}
    batch: Mapping[ServiceClass, Share] = {"batch": MIX["batch"]}
    arrivals = [
        arrival
        for load, mix in ((URGENT_LOAD, urgent), (BATCH_LOAD, batch))
        for arrival in make_trace(poisson_times(load * capacity, duration_s, rng), prompts, rng, mix)
    ]
    return sorted((replace(arrival, tenant="") for arrival in arrivals), key=lambda arrival: arrival.at_s)


def report(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """How batch requests got on.

    Returns:
        finished, requests, outcomes of batch requests; tokens_per_window: their tokens in each 10 s, the last and
        shorter one left out; empty_windows: windows without one though batch requests were waiting; longest_gap_s
        between two of their tokens; ttft_ms: percentiles; share_of_tokens: of all tokens.
    """
    batch = [r for r in records if r.arrival.service_class == "batch"]
    windows = [i * WINDOW_S for i in range(int(duration_s // WINDOW_S))]
    tokens = [sum(r.tokens_between(start, start + WINDOW_S) for r in batch) for start in windows]
    times = sorted(at_s for r in batch for at_s, _ in r.chunks if at_s <= duration_s)
    everything = sum(r.tokens_between(0.0, duration_s) for r in records)
    ours = sum(r.tokens_between(0.0, duration_s) for r in batch)
    return {
        "duration_s": duration_s,
        "requests": len(batch),
        "finished": sum(r.outcome == "finished" for r in batch),
        "refused": sum(r.outcome in ("shed", "failed") for r in batch),
        "tokens_per_window": tokens,
        "empty_windows": sum(
            count == 0 and _waits(batch, start, start + WINDOW_S) for start, count in zip(windows, tokens, strict=True)
        ),
        "longest_gap_s": longest_gap_s(times, batch, duration_s),
        "ttft_ms": percentiles(r.ttft_ms for r in batch),
        "share_of_tokens": ours / everything if everything else None,
    }


def longest_gap_s(times: Sequence[float], batch: Sequence[Record], duration_s: float) -> float:
    """The longest time without a batch token, from the first batch request's arrival to the end of the run."""
    if not batch:
        return 0.0
    marks = [min(r.arrival.at_s for r in batch), *times, duration_s]
    return max(later - earlier for earlier, later in itertools.pairwise(marks))


def _waits(batch: Sequence[Record], from_s: float, to_s: float) -> bool:
    """Whether a batch request that was not refused arrived before the window and got tokens after it, or never."""
    return any(
        r.arrival.at_s < from_s
        and r.outcome in ("finished", "unfinished")
        and (not r.chunks or r.chunks[-1][0] >= to_s)
        for r in batch
    )
