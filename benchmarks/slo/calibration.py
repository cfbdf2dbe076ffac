"""What the machine can do, measured at the start: latencies of a lone request, and the load that saturates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.peers.peer import PeerError
from benchmarks.slo.load import Record, Submit, keep_busy
from benchmarks.slo.targets import Target, median_target
from benchmarks.slo.trace import Arrival

LONGEST_S = 120.0


async def calibrate(
    alone: Sequence[Arrival], crowd: Sequence[Arrival], concurrency: int, submit: Submit
) -> tuple[Target, float]:
    """Run requests one at a time, then others `concurrency` at a time.

    Returns:
        Median latencies of the former, and how many of the latter are finished a second.

    Raises:
        PeerError: if requests fail.
    """
    unloaded = await _run(alone, 1, submit)
    loaded = await _run(crowd, concurrency, submit)
    return median_target(unloaded), saturated_rate(loaded)


async def _run(requests: Sequence[Arrival], concurrency: int, submit: Submit) -> list[Record]:
    began = asyncio.get_running_loop().time()
    records = await keep_busy(iter(requests), concurrency, submit, began, LONGEST_S)
    if wrong := [r for r in records if r.outcome != "finished"]:
        raise PeerError(f"{len(wrong)} requests of the calibration {wrong[0].outcome}: {wrong[0].error}")
    return records


def saturated_rate(records: Sequence[Record]) -> float:
    """Requests finished a second while the system was full: from the first end to the last start.

    Before, nothing can end yet; after, fewer and fewer run.

    Raises:
        PeerError: if that time is empty.
    """
    ends = sorted(r.chunks[-1][0] for r in records)
    last_start = max(r.arrival.at_s for r in records)
    finished = sum(ends[0] < end <= last_start for end in ends)
    if finished < 1:
        raise PeerError(f"{len(records)} requests are too few to see how fast a full system is")
    return finished / (last_start - ends[0])
