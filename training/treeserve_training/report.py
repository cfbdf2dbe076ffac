"""What training came to: a JSON file, and a plot of it where matplotlib is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treeserve_training.agreement import Agreement
from treeserve_training.held_out import Tally, together
from treeserve_training.learning_curve import CurvePoint


@dataclass
class Report:
    """Everything about one run.

    Attributes:
        settings: what was asked for.
        data: counts of the data folder.
        curves: for each drafter how its training came along.
        agreement: for each drafter, on held-out rows.
        trees: for each source (and "all" together) and budget of nodes, tallies by kind, of greedy requests.
    """

    settings: Mapping[str, Any]
    data: Mapping[str, int]
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)
    agreement: dict[str, Agreement] = field(default_factory=dict)
    trees: dict[str, dict[int, dict[str, Tally]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "settings": dict(self.settings),
            "data": dict(self.data),
            "curves": {source: [asdict(point) for point in curve] for source, curve in self.curves.items()},
            "agreement": {source: asdict(agreement) for source, agreement in self.agreement.items()},
            "acceptance": {
                source: {str(budget): _by_kind(tallies) for budget, tallies in budgets.items()}
                for source, budgets in self.trees.items()
            },
        }

    def write(self, folder: Path) -> list[Path]:
        """report.json, and report.png where it can be drawn; the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "report.json"]
        written[0].write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        if find_spec("matplotlib") is not None:
            written.append(folder / "report.png")
            self._draw(written[1])
        return written

    def _draw(self, path: Path) -> None:
        """Four panels: loss, acceptance by rank, by depth, and acceptance length by source and kind."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 8), layout="constrained")
        loss, ranks, depths, lengths = figure.subplots(2, 2).flat
        for source, curve in self.curves.items():
            steps = [point.sequences for point in curve]
            loss.plot(steps, [point.loss for point in curve], label=f"{source}, training")
            loss.plot(steps, [point.held_out_loss for point in curve], "--", label=f"{source}, held out")
        loss.set(title="loss", xlabel="sequences", ylabel="cross-entropy")
        for source, budgets in self.trees.items():
            tally, label = together(budgets[max(budgets)].values()), f"{source}, {max(budgets)} nodes"
            ranks.plot(list(tally.by_rank()), list(tally.by_rank().values()), "o-", label=label)
            depths.plot(list(tally.by_depth()), list(tally.by_depth().values()), "o-", label=label)
        ranks.set(title="acceptance by rank", xlabel="rank of the child", ylabel="share of asked steps")
        depths.set(title="acceptance by depth", xlabel="depth", ylabel="share of asked steps")
        self._draw_lengths(lengths)
        for axes in (loss, ranks, depths, lengths):
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small")
        figure.savefig(path, dpi=110)

    def _draw_lengths(self, axes: Any) -> None:
        for source, budgets in self.trees.items():
            tallies = budgets[max(budgets)]
            kinds = sorted(tallies)
            axes.plot(kinds, [tallies[kind].acceptance_length for kind in kinds], "o", label=source)
        axes.tick_params(axis="x", rotation=60)
        axes.set(title="acceptance length, greedy", ylabel="tokens a step")

    def lines(self) -> Sequence[str]:
        """The report in a few lines of text."""
        lines = []
        for source, agreement in self.agreement.items():
            first, three = agreement.top_by_rank[0], sum(agreement.top_by_rank[:3])
            lines.append(
                f"{source}: held-out loss {agreement.loss:.3f}; the target's choice is its first {first:.1%}, "
                f"among its first three {three:.1%} ({agreement.rows} tokens)"
            )
        for source, budgets in self.trees.items():
            for budget, tallies in budgets.items():
                length = together(tallies.values()).acceptance_length
                lines.append(f"{source}, {budget} nodes: greedy acceptance length {length:.2f}")
        return lines


def _by_kind(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    kinds = {kind: _numbers(tally) for kind, tally in sorted(tallies.items())}
    return {**_numbers(together(tallies.values())), "by_kind": kinds}


def _numbers(tally: Tally) -> dict[str, Any]:
    return {
        "acceptance_length": tally.acceptance_length,
        "steps": tally.steps,
        "nodes": tally.nodes,
        "by_depth": tally.by_depth(),
        "by_rank": tally.by_rank(),
    }
