"""From replayed passes to the figures of benchmarks/results/acceptance.json."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benchmarks.acceptance.configurations import WIDTHS
from benchmarks.acceptance.costs import CostTable
from benchmarks.acceptance.passes import GREEDY, LOOPING, SAMPLED, UNCOUPLED, Pass
from benchmarks.acceptance.record import PlainOutput
from benchmarks.acceptance.tally import Tally

MEAN = "mean"
ALL = "all"
_MOST_SHOWN = 8  # depths and ranks

# Verified tokens per step at widths 1 and 5: LLaMA-7B drafted for by LLaMA-68M (SpecInfer, ASPLOS'24).
SPECINFER = {
    GREEDY: {
        "Alpaca": (2.95, 3.43),
        "CP": (2.58, 3.69),
        "WebQA": (2.27, 3.07),
        "CIP": (2.73, 3.91),
        "PIQA": (2.18, 3.21),
    },
    SAMPLED: {
        "Alpaca": (1.79, 2.38),
        "CP": (1.69, 2.28),
        "WebQA": (1.64, 2.21),
        "CIP": (1.72, 2.29),
        "PIQA": (1.67, 2.21),
    },
}


def acceptance(passes: Sequence[Pass], tasks: Collection[str], tables: Sequence[CostTable]) -> dict[str, Any]:
    """The figures of all passes in which all nodes were verified.

    Args:
        tasks: those whose mean counts; others are listed beside them.

    Returns:
        `nodes`: the budget of what stands at the top: the largest.
        `acceptance_length[mode][configuration][task]` for greedy and sampled; task "mean" is the tasks' mean.
        `uncoupled[configuration][task]`: sampled text drafted for as if it were greedy.
        `by_nodes[budget][mode][configuration]`: all figures, see `figures`.
    """
    plain = [p for p in passes if not p.verified]
    top = max(p.nodes for p in plain)
    by_nodes: dict[str, Any] = {}
    for p in plain:
        by_mode = by_nodes.setdefault(str(p.nodes), {}).setdefault(p.mode, {})
        by_mode[p.configuration] = figures(p.tallies, tasks, tables)
    lengths = {
        mode: {name: f["acceptance_length"] for name, f in by_configuration.items()}
        for mode, by_configuration in by_nodes[str(top)].items()
    }
    uncoupled = lengths.pop(UNCOUPLED, {})
    return {"nodes": top, "acceptance_length": lengths, "uncoupled": uncoupled, "by_nodes": by_nodes}


def figures(tallies: Mapping[str, Tally], tasks: Collection[str], tables: Sequence[CostTable]) -> dict[str, Any]:
    """What one pass says of text that does not loop.

    Returns:
        `acceptance_length[task]`, `nodes` (verified per step) and `draft_us` (per step), `draft_us_of[source]`;
        `tokens_per_s[table]` and `speedup[table][task]` as predicted, where "all" is all tokens together, and
        `speedup_drafting_hidden[table]` if drafting took no time; `token_share[source]`, the share of tokens that a
        source proposed, and of them `token_share_alone[source]` no other did; `accepted_by_depth`: how often a level
        that was reached had the token; `accepted_by_rank`: how often a node's k-th best child had it.
    """
    straight = {task: tally for task, tally in tallies.items() if not task.endswith(LOOPING)}
    total = Tally.total(straight.values())
    return {
        "acceptance_length": with_mean({task: t.acceptance_length for task, t in straight.items()}, tasks),
        "nodes": total.nodes_per_step,
        "draft_us": total.draft_us,
        "draft_us_of": {name: 1e6 * s / total.steps for name, s in total.source_s.items() if total.steps},
        "tokens_per_s": {table.name: table.tokens_per_s(total) for table in tables},
        "speedup": {
            table.name: {ALL: table.speedup(total), **{task: table.speedup(t) for task, t in straight.items()}}
            for table in tables
        },
        "speedup_drafting_hidden": {table.name: table.speedup(total, with_drafting=False) for table in tables},
        "token_share": _shares(total.accepted_of, total.tokens),
        "token_share_alone": _shares(total.accepted_of_one, total.tokens),
        "accepted_by_depth": _rates(total.accepted_at_depth, total.tried_at_depth, first=1),
        "accepted_by_rank": _rates(total.accepted_at_rank, total.tried_at_rank, first=0),
    }


def planned(passes: Sequence[Pass], tasks: Collection[str], tables: Sequence[CostTable]) -> dict[str, Any]:
    """[table][mode][configuration]: figures where only nodes that pay by a cost table are verified."""
    found: dict[str, Any] = {}
    for table in tables:
        for p in passes:
            if p.verified == table.name:
                row = figures(p.tallies, tasks, [table])
                found.setdefault(table.name, {}).setdefault(p.mode, {})[p.configuration] = row
    return found


def looping(
    outputs: Mapping[str, Sequence[PlainOutput]], passes: Sequence[Pass], nodes: int
) -> dict[str, dict[str, Any]]:
    """Outputs that fell into repetition: their share by mode and task, and their acceptance length by configuration."""
    share: dict[str, dict[str, float]] = {}
    for mode in (GREEDY, SAMPLED):
        looped: dict[str, list[bool]] = {}
        for output in outputs[mode]:
            looped.setdefault(output.kind.removesuffix(LOOPING), []).append(output.kind.endswith(LOOPING))
        share[mode] = {task: sum(flags) / len(flags) for task, flags in looped.items()}
        share[mode][ALL] = sum(sum(flags) for flags in looped.values()) / max(1, len(outputs[mode]))
    lengths: dict[str, dict[str, float]] = {}
    for p in passes:
        total = Tally.total(t for task, t in p.tallies.items() if task.endswith(LOOPING))
        if p.nodes == nodes and not p.verified and total.steps:
            lengths.setdefault(p.mode, {})[p.configuration] = total.acceptance_length
    return {"share": share, "acceptance_length": lengths}


def widths(result: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    """[mode]: acceptance length with one to five draft models by budget, beside SpecInfer's.

    Args:
        also: configurations of one other draft model, to hold against them.
    """
    found: dict[str, Any] = {}
    for mode in (GREEDY, SAMPLED):
        means = {
            nodes: {name: f["acceptance_length"][MEAN] for name, f in by_mode.get(mode, {}).items()}
            for nodes, by_mode in result["by_nodes"].items()
        }
        found[mode] = {
            "ours_by_nodes": {nodes: [row[w] for w in WIDTHS if w in row] for nodes, row in means.items()},
            "also": {name: {nodes: row[name] for nodes, row in means.items() if name in row} for name in also},
            "specinfer": {data: {"ssm1": one, "ssm5": five} for data, (one, five) in SPECINFER[mode].items()},
        }
    return found


def with_mean(values: Mapping[str, float], tasks: Collection[str]) -> dict[str, float]:
    """The values and the mean of those that count; of all if none does."""
    counted = [value for task, value in values.items() if task in tasks] or list(values.values())
    return {**values, MEAN: statistics.mean(counted)} if counted else {}


def _shares(counts: Mapping[str, int], total: int) -> dict[str, float]:
    return {name: count / total for name, count in counts.items()} if total else {}


def _rates(hits: Mapping[int, int], tries: Mapping[int, int], first: int) -> list[float]:
    return [hits.get(i, 0) / tries[i] for i in range(first, first + _MOST_SHOWN) if tries.get(i)]
