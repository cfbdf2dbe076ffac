"""What a run came to: tokens that are wrong, lost or duplicated, requests that hung or failed, times of recovery."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.traffic import Trace
from treeserve_client import Completion


@dataclass(frozen=True)
class Verdict:
    """Counts over all requests.

    Attributes:
        wrong: tokens that differ from the undisturbed output, and ends (text, reason, usage, log-probs) that do.
        lost: tokens of the undisturbed output that did not come, those of failed and hung requests included.
        duplicated: tokens that came twice, or after the end of the undisturbed output.
        failed: requests that ended with an error.
    """

    requests: int
    wrong: int
    lost: int
    duplicated: int
    hung: int
    failed: int
    errors: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Nothing of the kind happened."""
        return not (self.wrong or self.lost or self.duplicated or self.hung or self.failed)


def judge(traces: Sequence[Trace], undisturbed: Mapping[int, Completion]) -> Verdict:
    """Compare each request with its undisturbed output, by seed."""
    wrong = lost = duplicated = 0
    for trace in traces:
        expected = undisturbed[trace.case.seed]
        got, due = trace.token_ids, expected.token_ids
        wrong += sum(mine != theirs for mine, theirs in zip(got, due, strict=False))
        lost += max(0, len(due) - len(got)) + trace.skipped
        duplicated += max(0, len(got) - len(due)) + trace.repeated
        if trace.completion is not None and _end(trace.completion) != _end(expected):
            wrong += 1
    return Verdict(
        requests=len(traces),
        wrong=wrong,
        lost=lost,
        duplicated=duplicated,
        hung=sum(trace.hung for trace in traces),
        failed=sum(bool(trace.error) for trace in traces),
        errors=tuple(sorted({trace.error for trace in traces if trace.error})),
    )


def _end(completion: Completion) -> tuple[object, ...]:
    usage = completion.usage
    return (
        completion.text,
        completion.finish_reason,
        completion.stop_string,
        completion.log_probs,
        usage.prompt_tokens,
        usage.completion_tokens,
    )


def recovery_ms(traces: Sequence[Trace], disturbed: Iterable[tuple[str, float]]) -> dict[str, dict[str, Any]]:
    """By kind: how long streams stood still that ran at a disturbance, milliseconds. A stream that it does not concern
    counts with what usually lies between its tokens.

    Args:
        disturbed: kind and time of each disturbance.
    """
    by_kind: dict[str, list[float]] = {}
    slowest: dict[str, list[float]] = {}
    for kind, at in disturbed:
        waits = [1e3 * wait for trace in traces if (wait := trace.silence_s(at)) is not None]
        by_kind.setdefault(kind, []).extend(waits)
        slowest.setdefault(kind, []).append(max(waits, default=0.0))
    return {
        kind: {
            "times": len(slowest[kind]),
            "streams": len(waits),
            "p50": statistics.median(waits) if waits else 0.0,
            "max": max(slowest[kind]),
        }
        for kind, waits in by_kind.items()
    }
