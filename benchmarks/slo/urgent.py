"""A realtime request on a full system: how much later its first token comes than on an idle one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.peers.peer import PeerError
from benchmarks.rendered_prompts import Prompts
from benchmarks.slo.load import Record, Submit, keep_busy, run_trace
from benchmarks.slo.steps import Buckets, step_quantile_ms
from benchmarks.slo.trace import Arrival
from treeserve_simulator.percentiles import percentiles

FILLERS = 48  # batch requests in flight: more than a verifier runs at once
_OUTPUT_TOKENS = 8
_FILLER_TOKENS = 192
_SPACING_S = (0.4, 0.9)
_SETTLE_S = 4.0  # until the fillers run
_LAST_S = 10.0  # for the last probe


def make_probes(count: int, prompts: Prompts, rng: random.Random) -> list[Arrival]:
    """Realtime requests so far apart that none meets the one before; of no tenant, so that nothing is cached."""
    times, at_s = [], 0.0
    for _ in range(count):
        at_s += rng.uniform(*_SPACING_S)
        times.append(at_s)
    texts = [prompt for ours in prompts.values() for prompt in ours]
    return [Arrival(at_s, "urgent", "realtime", "", rng.choice(texts), _OUTPUT_TOKENS) for at_s in times]


def make_fillers(prompts: Prompts, rng: random.Random) -> Iterator[Arrival]:
    """Batch requests without end."""
    texts = [prompt for ours in prompts.values() for prompt in ours]
    while True:
        yield Arrival(0.0, "filler", "batch", "", rng.choice(texts), _FILLER_TOKENS)


def longest_s(count: int) -> float:
    """How long measuring so many probes takes at most."""
    return 2 * (count * _SPACING_S[1] + _LAST_S) + _SETTLE_S


async def measure(
    count: int, prompts: Prompts, submit: Submit, scrape: Callable[[], Buckets], rng: random.Random
) -> dict[str, Any]:
    """Send the same probes to the idle system, then to the full one; see `report`.

    Raises:
        PeerError: if a probe fails, or the verifier's steps cannot be read.
    """
    probes = make_probes(count, prompts, rng)
    ends_s = probes[-1].at_s + _LAST_S
    alone = await run_trace(probes, submit, ends_s)
    fill_s = _SETTLE_S + probes[-1].at_s + 1.0
    began = asyncio.get_running_loop().time()

    async def probe() -> dict[str, Any]:
        await asyncio.sleep(_SETTLE_S)
        before = scrape()
        full = await run_trace(probes, submit, ends_s)
        return report(alone, full, before, scrape())

    fill = keep_busy(make_fillers(prompts, rng), FILLERS, submit, began, fill_s)
    found, fillers = await asyncio.gather(probe(), fill)
    return {**found, "fillers": fillers_report(fillers)}


def report(alone: Sequence[Record], full: Sequence[Record], before: Buckets, after: Buckets) -> dict[str, Any]:
    """The probes' figures.

    Args:
        alone, full: the same probes on the idle and on the full system, in the same order.
        before, after: the verifier's steps around the latter.

    Returns:
        ttft_ms and own_ms: percentiles of the time to the first token on the full and the idle system; excess_ms: of
        the difference, probe by probe; step_ms: of the full system's steps; bound_ms: a step and the
        own time, both at p99; within_one_step: share of the probes whose excess is at most the p99 step.
    """
    if wrong := [r for r in (*alone, *full) if r.outcome != "finished"]:
        raise PeerError(f"{len(wrong)} realtime requests {wrong[0].outcome}: {wrong[0].error}")
    pairs = [(a.ttft_ms, f.ttft_ms) for a, f in zip(alone, full, strict=True)]
    excess = [full_ms - own_ms for own_ms, full_ms in pairs if own_ms is not None and full_ms is not None]
    step_ms = {f"p{q}": step_quantile_ms(before, after, q / 100) for q in (50, 99)}
    longest = step_ms["p99"]
    own_ms = percentiles(a for a, _ in pairs)
    return {
        "probes": len(full),
        "ttft_ms": percentiles(f for _, f in pairs),
        "own_ms": own_ms,
        "excess_ms": percentiles(excess),
        "step_ms": step_ms,
        "bound_ms": None if longest is None or own_ms["p99"] is None else own_ms["p99"] + longest,
        "within_one_step": None if longest is None else sum(e <= longest for e in excess) / len(excess),
    }


def fillers_report(records: Sequence[Record]) -> dict[str, Any]:
    """What became of the batch requests that filled the system."""
    return {
        "requests": len(records),
        "tokens": sum(r.tokens for r in records),
        "refused": sum(r.outcome in ("shed", "failed") for r in records),
    }
