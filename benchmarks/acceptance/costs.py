"""What steps cost: tables of milliseconds by rows, and the speed that follows from replayed steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.acceptance.tally import Tally
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.sequence import DraftPrices
from treeserve_verifier.cost_model import CostModel

FLAT_GPU = Path(__file__).parent / "flat_gpu.json"
_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 16, 20, 24, 25)
_CONTEXT = 256
_TIMES = 15


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of one sequence's step by its rows.

    Attributes:
        origin: where the numbers come from.
    """

    name: str
    origin: str
    model: CostModel

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """A table from a file: {"name", "origin", "ms": {rows: milliseconds}}."""
        content = json.loads(path.read_text(encoding="utf-8"))
        table = {int(rows): float(ms) for rows, ms in content["ms"].items()}
        return cls(content["name"], content["origin"], CostModel(table))

    @classmethod
    def measure(cls, runner: ModelRunner, clock_s: Callable[[], float]) -> CostTable:
        """This machine's: forward passes of growing trees after 256 tokens, the fastest of many for each size."""
        blocks, seq_id = runner.blocks, 0
        blocks.add(seq_id)
        blocks.reserve(seq_id, _CONTEXT)
        runner.forward([SequenceRows.from_chain(seq_id, range(_CONTEXT), ())])
        runner.commit(seq_id, range(_CONTEXT))
        fastest = dict.fromkeys(_MEASURED_ROWS, math.inf)
        for _ in range(_TIMES):  # all sizes in each round: a disturbance spoils a round, not a size
            for rows in _MEASURED_ROWS:
                blocks.reserve(seq_id, rows)
                began = clock_s()
                runner.forward([SequenceRows.from_chain(seq_id, range(rows), range(rows))])
                fastest[rows] = min(fastest[rows], 1e3 * (clock_s() - began))
                blocks.rollback(seq_id)
        blocks.free(seq_id)
        origin = f"measured in this run: forward passes after {_CONTEXT} tokens, the fastest of {_TIMES}"
        return cls("this machine", origin, CostModel(fastest))

    @property
    def plain_tokens_per_s(self) -> float:
        """Plain decoding of one sequence."""
        return 1e3 / self.model.step_ms(1)

    @property
    def prices(self) -> DraftPrices:
        """What the verifier would tell drafters: of a token, and of one more row beside the root."""
        token_ms = self.model.step_ms(1)
        return DraftPrices(token_us=1e3 * token_ms, node=self.model.step_ms(2) / token_ms - 1.0)

    def tokens_per_s(self, tally: Tally, *, with_drafting: bool = True) -> float:
        """Tokens over the time of the steps and, unless it is hidden behind them, of drafting."""
        seconds = sum(count * self.model.step_ms(rows) for rows, count in tally.rows.items()) / 1e3
        seconds += tally.draft_s if with_drafting else 0.0
        return tally.tokens / seconds if seconds else 0.0

    def speedup(self, tally: Tally, *, with_drafting: bool = True) -> float:
        """That over plain decoding."""
        return self.tokens_per_s(tally, with_drafting=with_drafting) / self.plain_tokens_per_s

    def paying(self, tree: TokenTree) -> TokenTree:
        """The nodes that raise expected tokens per unit time, as the verifier's planner chooses them."""
        best, best_rate, expected = 0, 0.0, 1.0
        for n in range(len(tree.ranking) + 1):
            if n > 0:
                expected += math.exp(tree.ranking[n - 1][0])
            rate = expected / self.model.step_ms(1 + n)
            if rate > best_rate:
                best, best_rate = n, rate
        return tree.pruned(best)
