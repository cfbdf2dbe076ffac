"""End to end: `treeserve up` with speculation and without, request by request in random order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.acceptance.passes import GREEDY, LOOPING, SAMPLED
from benchmarks.acceptance.record import PlainOutput
from benchmarks.acceptance.report import ALL
from benchmarks.peers import report
from benchmarks.peers.peer import Settings
from benchmarks.peers.rounds import Plan, Rounds
from benchmarks.peers.tasks import Request
from benchmarks.peers.treeserve import OFF, ON, Treeserve


@dataclass(frozen=True)
class LivePlan:
    """How much to run.

    Attributes:
        rounds: each with prompts of its own and a cluster that is started anew.
        per_task: requests of each task in a round.
        max_tokens: as the outputs were recorded with.
    """

    rounds: int
    per_task: int
    max_tokens: int


def measure(
    settings: Settings,
    dtype: str,
    options: Sequence[str],
    outputs: Mapping[str, Sequence[PlainOutput]],
    plan: LivePlan,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """[mode]: `tokens_per_s[on or off][task]`, `on_over_off[task]`, `tokens_per_step[task]`, and whether tokens agree.

    Task "all" is all requests together. Prompts whose outputs loop are left out; generations end where the model ends
    them. `on_equals_off` and `on_equals_recorded` are shares of requests.
    """
    found: dict[str, Any] = {}
    for mode in (GREEDY, SAMPLED):
        usable = [output for output in outputs[mode] if not output.kind.endswith(LOOPING)]
        rounds = Rounds(
            Plan(plan.rounds, plan.max_tokens, {1: plan.per_task}),
            [(Treeserve(settings, dtype, options),)],
            partial(requests, usable, plan.per_task, plan.max_tokens),
            say,
        )
        rounds.run()
        if rounds.skipped:
            return {"skipped": rounds.skipped}
        found[mode] = _figures(rounds, usable)
    return found


def requests(
    outputs: Sequence[PlainOutput], per_task: int, max_tokens: int, round_index: int, _batch: int = 1
) -> list[Request]:
    """The requests of a round: the next prompts of each task, around the end, none twice."""
    by_task: dict[str, list[PlainOutput]] = {}
    for output in outputs:
        by_task.setdefault(output.kind, []).append(output)
    chosen = [
        ours[(round_index * per_task + i) % len(ours)]
        for i in range(per_task)
        for ours in by_task.values()
        if i < len(ours)
    ]
    return [Request(o.kind, o.prompt_ids, max_tokens, o.temperature, o.seed, ignore_eos=False) for o in chosen]


def _figures(rounds: Rounds, outputs: Sequence[PlainOutput]) -> dict[str, Any]:
    cells, batch = rounds.cells, "1"
    by_task, together = report.by_task(cells), report.medians(cells, lambda cell: cell.tokens_per_s)
    recorded = {(o.kind, o.output_ids) for o in outputs}
    served = [(r.task, r.token_ids) for c in cells if c.system == ON for r in c.replies]
    return {
        "tokens_per_s": {
            name: {ALL: together[system][batch], **by_task[system][batch]}
            for name, system in (("on", ON), ("off", OFF))
        },
        "on_over_off": report.ratios(cells, ON, OFF)[batch],
        "tokens_per_step": report.tokens_per_step(cells, ON)[batch],
        "on_equals_off": report.equal_share(cells, ON, OFF),
        "on_equals_recorded": sum(reply in recorded for reply in served) / len(served),
        "requests": len(served),
    }
