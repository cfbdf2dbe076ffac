"""The figures on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from benchmarks.acceptance.configurations import MERGED, WIDTHS
from benchmarks.acceptance.passes import MODES
from benchmarks.acceptance.report import ALL, MEAN, SPECINFER

_SHORT = {"question_answering": "qa", "translation": "transl.", "extraction": "extract"}


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print all tables of a result."""
    for mode in MODES:
        if mode in result["by_nodes"][str(result["nodes"])]:
            console.print(by_task(result, mode))
    console.print(by_budget(result))
    console.print(by_source(result))
    console.print(by_place(result))
    console.print(by_width(result))
    if "live" in result:
        console.print(live(result["live"]))
    shares = {mode: share[ALL] for mode, share in result["looping"]["share"].items()}
    console.print("looping outputs, left out above: " + ", ".join(f"{m} {100 * s:.0f} %" for m, s in shares.items()))
    for name, reason in result["skipped"].items():
        console.print(f"{name} is skipped: {reason}", markup=False)


def by_task(result: Mapping[str, Any], mode: str) -> Group:
    """Acceptance length of each configuration and task at the largest budget, with costs and predicted speed."""
    cells = result["by_nodes"][str(result["nodes"])][mode]
    tasks = list(dict.fromkeys(task for f in cells.values() for task in f["acceptance_length"] if task != MEAN))
    machine = result["costs"][0]["name"]
    table = _table()
    costs = ("nodes", "draft us", "tok/s", "x plain", "best x plain")
    for heading in ("configuration", *(_SHORT.get(t, t) for t in tasks), MEAN, *costs):
        table.add_column(heading, justify="left" if heading == "configuration" else "right")
    for name, f in cells.items():
        lengths = f["acceptance_length"]
        table.add_row(
            name,
            *(_number(lengths.get(task)) for task in tasks),
            _number(lengths.get(MEAN)),
            f"{f['nodes']:.1f}",
            f"{f['draft_us']:.0f}",
            f"{f['tokens_per_s'][machine]:.0f}",
            _number(f["speedup"][machine][ALL]),
            _best_speedup(result, mode, name, machine),
        )
    return _titled(f"{mode}: tokens a step with at most {result['nodes']} nodes", table)


def _best_speedup(result: Mapping[str, Any], mode: str, configuration: str, table: str) -> str:
    """The predicted speed of the best budget, and which it is."""
    speeds = [
        (by_mode[mode][configuration]["speedup"][table][ALL], nodes) for nodes, by_mode in result["by_nodes"].items()
    ]
    speed, nodes = max(speeds)
    return f"{speed:.2f} with {nodes:>2}"


def by_budget(result: Mapping[str, Any]) -> Group:
    """All sources merged: what each budget brings, and what speed follows from each cost table."""
    names = [table["name"] for table in result["costs"]]
    table = _table()
    speeds = [heading for name in names for heading in (name, "if hidden", "worst task")]
    for heading in ("mode", "nodes", "tokens a step", "drafted", "draft us", *speeds):
        table.add_column(heading, justify="left" if heading in ("mode", "worst task") else "right")
    for mode in MODES:
        rows = [(nodes, by_mode.get(mode, {})) for nodes, by_mode in result["by_nodes"].items()]
        rows += [("that pay", by_mode.get(mode, {})) for by_mode in result["planned"].values()]
        for nodes, cells in rows:
            if MERGED in cells:
                f = cells[MERGED]
                length = _number(f["acceptance_length"][MEAN])
                table.add_row(
                    mode,
                    nodes,
                    length,
                    f"{f['nodes']:.1f}",
                    f"{f['draft_us']:.0f}",
                    *(cell for name in names for cell in _speeds(f, name)),
                )
    return _titled(
        "merged: speed over plain decoding predicted from cost tables, also if drafting were hidden behind steps", table
    )


def _speeds(figures: Mapping[str, Any], table: str) -> tuple[str, str, str]:
    """Predicted speeds by one table: in all, without the drafter's time, and where it is least."""
    by_task = dict(figures["speedup"].get(table, {}))
    if not by_task:
        return "", "", ""
    total = by_task.pop(ALL)
    worst = min(by_task, key=lambda task: by_task[task])
    hidden = figures["speedup_drafting_hidden"][table]
    return _number(total), _number(hidden), f"{by_task[worst]:.2f} {_SHORT.get(worst, worst)}"


def by_source(result: Mapping[str, Any]) -> Group:
    """All sources merged: share of tokens that each proposed."""
    cells = {m: by[MERGED] for m, by in result["by_nodes"][str(result["nodes"])].items() if MERGED in by}
    table = _table()
    table.add_column("source")
    for mode in cells:
        table.add_column(mode, justify="right")
    for source in sorted({source for f in cells.values() for source in f["token_share"]}):
        shares = [(f["token_share"].get(source, 0.0), f["token_share_alone"].get(source, 0.0)) for f in cells.values()]
        table.add_row(source, *(f"{100 * share:.1f} ({100 * alone:.1f})" for share, alone in shares))
    return _titled(f"merged, {result['nodes']} nodes: % of tokens that a source proposed (that it alone did)", table)


def by_place(result: Mapping[str, Any]) -> Group:
    """Each configuration: how often a level that was reached, and how often a node's k-th child, had the token."""
    table = _table()
    for heading in ("mode", "configuration", "depth", "rank"):
        table.add_column(heading)
    for mode, cells in result["by_nodes"][str(result["nodes"])].items():
        for name, f in cells.items():
            rates = (f["accepted_by_depth"], f["accepted_by_rank"])
            table.add_row(mode, name, *(" ".join(f"{100 * rate:3.0f}" for rate in row) for row in rates))
    return _titled(f"{result['nodes']} nodes: % accepted by depth 1 2 3 ... and by rank of the child 1 2 3 ...", table)


def by_width(result: Mapping[str, Any]) -> Group:
    """One to five draft models, beside SpecInfer's figures."""
    table = _table()
    for heading in ("mode", "whose", *WIDTHS):
        table.add_column(heading, justify="right" if heading in WIDTHS else "left")
    for mode, found in result["widths"].items():
        for nodes, row in found["ours_by_nodes"].items():
            table.add_row(mode, f"ours, {nodes} nodes", *(f"{value:.2f}" for value in row))
        for name, by_nodes in found["also"].items():
            for nodes, value in by_nodes.items():
                table.add_row(mode, f"{name}, {nodes} nodes", f"{value:.2f}")
        narrow, wide = (statistics.mean(pair[i] for pair in SPECINFER[mode].values()) for i in (0, 1))
        table.add_row(mode, "SpecInfer, five data sets", f"{narrow:.2f}", "", "", "", f"{wide:.2f}")
    return _titled("tokens a step with 1 to 5 draft models", table)


def live(found: Mapping[str, Any]) -> Group:
    """Measured end to end: tokens per second with speculation and without."""
    table = _table()
    for heading in ("mode", "task", "on tok/s", "off tok/s", "on / off", "tokens a step"):
        table.add_column(heading, justify="left" if heading in ("mode", "task") else "right")
    for mode, f in found.items():
        for task in f["on_over_off"]:
            speeds = [f["tokens_per_s"][system].get(task) for system in ("on", "off")]
            steps = f["tokens_per_step"].get(task)
            row = (*(_number(s, 0) for s in speeds), _number(f["on_over_off"][task]), _number(steps))
            table.add_row(mode, task, *row)
    return _titled("measured through the whole service, one request at a time", table)


def _table() -> Table:
    return Table(box=None, header_style="bold", pad_edge=False)


def _titled(title: str, table: Table) -> Group:
    return Group("", title, table)  # a table's own title is broken at the table's width


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
