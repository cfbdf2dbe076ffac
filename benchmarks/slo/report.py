"""The report of the load levels: every figure by system, level and class, and the systems side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.slo import score
from benchmarks.slo.load import Record
from benchmarks.slo.systems import BASELINES, TREESERVE
from benchmarks.slo.targets import Targets

Runs = Mapping[str, Sequence[Sequence[Record]]]  # [system][level]: the records of the level's trace, in its order


@dataclass(frozen=True)
class Level:
    """A load: how many requests arrive a second, and how many times what saturates the plain system that is."""

    load: float
    requests_per_s: float


def summary(runs: Runs, levels: Sequence[Level], targets: Targets, window_s: float) -> dict[str, Any]:
    """All figures of the load levels.

    `violations`, `goodput`, `throughput` and `attainment` by system are those of all levels together; `at_knee`,
    `past_knee` and `saturated` have the same of one level each: the knee, the next one, and the highest.
    """
    together = {
        name: score.figures(_all(rows), targets, window_s, len(levels))
        | {"by_class": score.by_class(_all(rows), targets, window_s, len(levels))}
        for name, rows in runs.items()
    }
    by_level = {
        name: [
            score.figures(row, targets, window_s) | {"by_class": score.by_class(row, targets, window_s)} for row in rows
        ]
        for name, rows in runs.items()
    }
    result: dict[str, Any] = side_by_side(together) | {
        "by_class": {name: found["by_class"] for name, found in together.items()},
        "by_level": by_level,
        "levels": [{"load": level.load, "requests_per_s": level.requests_per_s} for level in levels],
        "same_tokens": [score.same_tokens([rows[i] for rows in runs.values()]) for i in range(len(levels))],
    }
    attainments = {name: [row["attainment"] or 0.0 for row in rows] for name, rows in by_level.items()}
    loads = [level.requests_per_s for level in levels]
    result["sustained_requests_per_s"] = {n: score.sustained_load(loads, row) for n, row in attainments.items()}

    def at(index: int) -> dict[str, Any] | None:
        if not 0 <= index < len(levels):
            return None
        return {"level": index} | side_by_side({name: rows[index] for name, rows in by_level.items()})

    baselines = [name for name in BASELINES if name in runs]
    knee = score.knee(attainments, baselines) if baselines else None
    result["at_knee"] = None if knee is None else at(knee)
    result["past_knee"] = at(0 if knee is None else knee + 1)
    result["saturated"] = at(len(levels) - 1)
    return result


def side_by_side(by_system: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each system's figures by name of the figure, and treeserve beside the better baseline if both are there."""
    names = ("requests", "violations", "attainment", "goodput", "throughput")
    result: dict[str, Any] = {name: {system: row[name] for system, row in by_system.items()} for name in names}
    if TREESERVE in by_system and len(by_system) > 1:
        result["treeserve"] = score.compared(result["violations"], result["goodput"], TREESERVE)
    return result


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print attainment and goodput of every level, and attainment by class over all levels."""
    table = Table(title="share of requests that met their targets, and goodput in tokens/s, by load")
    table.add_column("system")
    for level in result["levels"]:
        table.add_column(f"{level['load']:g}x ({level['requests_per_s']:.1f}/s)", justify="right")
    for system, rows in result["by_level"].items():
        table.add_row(system, *(f"{_percent(row['attainment'])}  {row['goodput']:.0f}" for row in rows))
    console.print(table)
    classes = list(dict.fromkeys(name for row in result["by_class"].values() for name in row))
    table = Table(title="share of requests that met their targets, by class, all loads")
    table.add_column("system")
    for name in classes:
        table.add_column(name, justify="right")
    for system, row in result["by_class"].items():
        table.add_row(system, *(_percent(row[name]["attainment"]) if name in row else "-" for name in classes))
    console.print(table)
    for place in ("at_knee", "past_knee", "saturated"):
        if result[place] is not None and "treeserve" in result[place]:
            console.print(f"{place}, level {result[place]['level']}: {result[place]['treeserve']}", highlight=False)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _all(rows: Sequence[Sequence[Record]]) -> list[Record]:
    return [record for row in rows for record in row]
