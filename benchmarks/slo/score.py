"""From records to figures: attainment, violations, goodput, latencies, and the load at which a system gives way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.slo.load import Record
from benchmarks.slo.targets import Targets
from benchmarks.slo.trace import CLASSES
from treeserve_simulator.percentiles import percentiles

ATTAINED = 0.9


def figures(records: Sequence[Record], targets: Targets, window_s: float, runs: int = 1) -> dict[str, Any]:
    """What requests got.

    Args:
        window_s: how long requests arrived in each run.
        runs: how many runs they come from.

    Returns:
        requests; violations: those that missed a target, were refused, failed or did not finish; attainment: share of
        the others, None without requests; goodput: output tokens of requests that met their targets, over the time in
        which requests arrived; throughput: output tokens that came in that time, over it; outcomes; percentiles of
        ttft_ms and tpot_ms of the requests that have one.
    """
    met = [r for r in records if targets[r.arrival.service_class].is_met_by(r)]
    seconds = window_s * runs
    return {
        "requests": len(records),
        "violations": len(records) - len(met),
        "attainment": len(met) / len(records) if records else None,
        "goodput": sum(r.tokens for r in met) / seconds,
        "throughput": sum(r.tokens_between(0.0, window_s) for r in records) / seconds,
        "outcomes": dict(Counter(r.outcome for r in records)),
        "ttft_ms": percentiles(r.ttft_ms for r in records),
        "tpot_ms": percentiles(r.tpot_ms for r in records),
    }


def by_class(records: Sequence[Record], targets: Targets, window_s: float, runs: int = 1) -> dict[str, dict[str, Any]]:
    """`figures` of each class that has requests."""
    found = {name: [r for r in records if r.arrival.service_class == name] for name in CLASSES}
    return {name: figures(ours, targets, window_s, runs) for name, ours in found.items() if ours}


def knee(attainments: Mapping[str, Sequence[float]], baselines: Sequence[str]) -> int | None:
    """Index of the highest load at which the best of the baselines still attains 90 %; None if it never does.

    Args:
        attainments: of each system, at loads in rising order.
    """
    best = [max(row) for row in zip(*(attainments[name] for name in baselines), strict=True)]
    return max((level for level, value in enumerate(best) if value >= ATTAINED), default=None)


def sustained_load(loads: Sequence[float], attainments: Sequence[float]) -> float | None:
    """The load up to which 90 % is attained, interpolated between those that were measured.

    None if not even the lowest is; the highest if all are, which then is a lower bound.
    """
    previous: tuple[float, float] | None = None
    for load, attained in zip(loads, attainments, strict=True):
        if attained < ATTAINED:
            if previous is None:
                return None
            share = (previous[1] - ATTAINED) / (previous[1] - attained)
            return previous[0] + share * (load - previous[0])
        previous = (load, attained)
    return previous[0] if previous is not None else None


def compared(violations: Mapping[str, int], goodput: Mapping[str, float], system: str) -> dict[str, float | None]:
    """A system beside the better of the others, for each figure by itself.

    Returns:
        violations_divided_by: the fewest violations of another over the system's; None if the system has none.
        goodput_times: the system's goodput over the highest of another; None if the others have none.
    """
    fewest = min(count for name, count in violations.items() if name != system)
    highest = max(value for name, value in goodput.items() if name != system)
    return {
        "violations_divided_by": fewest / violations[system] if violations[system] else None,
        "goodput_times": goodput[system] / highest if highest else None,
    }


def same_tokens(runs: Sequence[Sequence[Record]]) -> float | None:
    """Share of the requests that ended in at least two of the runs and gave the same tokens in all where they ended.

    Args:
        runs: records of the same trace, in its order.
    """
    ended = [[r.token_ids for r in row if r.outcome == "finished"] for row in zip(*runs, strict=True)]
    several = [tokens for tokens in ended if len(tokens) > 1]
    return sum(len(set(tokens)) == 1 for tokens in several) / len(several) if several else None
