"""Runs the replays: every mode, configuration and node budget, each with a drafter of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from benchmarks.acceptance.configurations import Configuration
from benchmarks.acceptance.costs import CostTable
from benchmarks.acceptance.record import PlainOutput
from benchmarks.acceptance.replay import Recording, SourceClock, replay
from benchmarks.acceptance.tally import Tally
from treeserve_core.features import FeatureRows
from treeserve_speculator.sequence import UNPRICED

GREEDY, SAMPLED, UNCOUPLED = "greedy", "sampled", "uncoupled"
MODES = (GREEDY, SAMPLED, UNCOUPLED)
TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0, UNCOUPLED: 1.0}
LOOPING = " (looping)"  # added to the task of an output that loops


@dataclass(frozen=True)
class Pass:
    """One replay.

    Attributes:
        mode: greedy; sampled at temperature 1; or uncoupled, where the same text is drafted for as if it were greedy.
        nodes: budget of each tree.
        verified: the cost table by which nodes were chosen among those; empty if all were verified.
        tallies: by task.
    """

    mode: str
    configuration: str
    nodes: int
    verified: str
    tallies: Mapping[str, Tally]


@dataclass(frozen=True)
class Target:
    """The model whose outputs are replayed."""

    folder: Path
    eos_token_ids: tuple[int, ...]


def in_turns(outputs: Sequence[PlainOutput]) -> list[PlainOutput]:
    """Outputs of all tasks in turn, as mixed traffic would bring them."""
    by_task: dict[str, list[PlainOutput]] = {}
    for output in outputs:
        by_task.setdefault(output.kind, []).append(output)
    return [output for turn in zip_longest(*by_task.values()) for output in turn if output is not None]


class Passes:
    """Replays recorded outputs.

    Args:
        outputs: by mode, tasks in turn.
        report: told in one line what came out.
        features: the target's hidden states along an output, for drafters that want them.
    """

    def __init__(
        self,
        target: Target,
        outputs: Mapping[str, Sequence[PlainOutput]],
        report: Callable[[str], None],
        features: Callable[[Recording], FeatureRows] | None = None,
    ) -> None:
        self._target = target
        self._outputs = outputs
        self._report = report
        self._features = features

    def run(self, configurations: Sequence[Configuration], budgets: Sequence[int]) -> Iterator[Pass]:
        """All modes, configurations and budgets; of configurations that are the same, one is run for all."""
        for mode in MODES:
            for nodes in budgets:
                done: list[tuple[Configuration, Pass]] = []
                for configuration in configurations:
                    same = next((p for c, p in done if c.is_like(configuration)), None)
                    result = self.one(mode, configuration, nodes) if same is None else same
                    done.append((configuration, result))
                    yield replace(result, configuration=configuration.name)

    def one(self, mode: str, configuration: Configuration, nodes: int, table: CostTable | None = None) -> Pass:
        """One replay; with a cost table only nodes that pay by it are verified, and the drafter knows its prices."""
        drafter = configuration.drafter(self._target.folder)
        tallies = replay(
            drafter,
            self._outputs[mode],
            nodes,
            coupled=mode != UNCOUPLED,
            eos_token_ids=self._target.eos_token_ids,
            prices=table.prices if table is not None else UNPRICED,
            features=self._features if drafter.feature_shape is not None else None,
            choose=table.paying if table is not None else None,
            source_clock=SourceClock(drafter.sources),
        )
        del drafter
        gc.collect()  # draft models hold caches that refer to each other
        total = Tally.total(tallies.values())
        self._report(
            f"{mode:<9} {configuration.name:<14} {nodes:>2} nodes{' that pay' if table is not None else ''}: "
            f"{total.acceptance_length:.2f} tokens a step, {total.draft_us:.0f} us of drafting"
        )
        return Pass(mode, configuration.name, nodes, table.name if table is not None else "", tallies)
