"""What a system made of a trace, in figures: percentiles, attainment and throughput, by class and in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeserve_core.qos import QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.percentiles import PERCENTILES, percentiles
from treeserve_simulator.record import Record
from treeserve_simulator.simulation import Outcome

Policies = Mapping[ServiceClass, QosPolicy]


def meets_targets(record: Record, policies: Policies) -> bool:
    """Whether a request ended, and in time. A class without targets is content with an end."""
    policy = policies[record.request.service_class]
    measured = ((record.ttft_ms, policy.ttft_ms), (record.tpot_ms, policy.tpot_ms))
    in_time = all(value is None or target is None or value <= target for value, target in measured)
    return record.outcome == "finished" and in_time


def figures(records: Sequence[Record], policies: Policies, window_s: float) -> dict[str, Any]:
    """What requests got.

    Args:
        window_s: how long requests arrived; what is per second is per second of it.

    Returns:
        requests, violations (targets missed, refused or failed), attainment (the share that is no violation), met_per_s
        (requests that met all their targets), tokens_per_s, outcomes, and percentiles of ttft_ms and tpot_ms.
    """
    met = sum(meets_targets(record, policies) for record in records)
    outcomes = [record.outcome for record in records]
    prompt_tokens = sum(r.request.prompt_tokens for r in records)
    return {
        "requests": len(records),
        "violations": len(records) - met,
        "attainment": met / len(records) if records else None,
        "met_per_s": met / window_s if window_s else None,
        "tokens_per_s": sum(r.tokens for r in records) / window_s if window_s else None,
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "ttft_ms": percentiles(r.ttft_ms for r in records),
        "tpot_ms": percentiles(r.tpot_ms for r in records),
        "acceptance_length": _ratio(sum(r.steps + r.accepted for r in records), sum(r.steps for r in records)),
        "prefix_hit_rate": _ratio(sum(r.cached_tokens for r in records), prompt_tokens),
    }


def report(outcome: Outcome, policies: Policies) -> dict[str, Any]:
    """All figures of one system, ready for JSON."""
    records = outcome.records
    window_s = max((r.request.at_s for r in records), default=0.0) or outcome.simulated_s
    classes = {c: [r for r in records if r.request.service_class is c] for c in ServiceClass}
    return {
        "system": outcome.system,
        "all": figures(records, policies, window_s),
        "classes": {c.name.lower(): figures(ours, policies, window_s) for c, ours in classes.items() if ours},
        "arrivals_s": window_s,
        "simulated_s": outcome.simulated_s,
        "cpu_s": outcome.cpu_s,
        "busy_share": outcome.busy_share,
        "steps": outcome.steps,
        "rows_per_step": _ratio(outcome.rows, outcome.steps),
        "pauses": outcome.pauses,
        "preemptions": outcome.preemptions,
        "replays": sum(r.replays for r in records),
    }


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """The figures that matter most in aligned columns: a line for each system and class."""
    head = ("system", "class", "requests", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99", "attained", "met/s")
    lines = [head, *(_line(each["system"], *ours) for each in reports for ours in _parts(each))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(_padded(line, widths)) for line in lines)


def _padded(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, figures to the right."""
    cells = enumerate(zip(line, widths, strict=True))
    return [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in cells]


def _parts(each: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [*each["classes"].items(), ("all", each["all"])]


def _line(system: str, name: str, ours: Mapping[str, Any]) -> tuple[str, ...]:
    latencies = [ours[what][f"p{q}"] for what in ("ttft_ms", "tpot_ms") for q in PERCENTILES]
    return (
        system,
        name,
        str(ours["requests"]),
        *("-" if value is None else f"{value:.1f}" for value in latencies),
        f"{ours['attainment']:.1%}",
        "-" if ours["met_per_s"] is None else f"{ours['met_per_s']:.3g}",
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
