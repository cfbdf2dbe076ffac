"""What things take on a simulated machine: forward passes by rows and context, and everything around them."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError
from treeserve_simulator.text import KINDS, TextKind

DEFAULT_MACHINE = Path(__file__).parent / "machine.json"


@dataclass(frozen=True)
class PassRows:
    """One sequence's part of a forward pass.

    Attributes:
        context: KV positions before its rows.
        logits: rows whose logits are computed.
    """

    rows: int
    context: int
    logits: int


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a forward pass. Between what was measured it is linear; beyond, the last slope goes on.

    Attributes:
        rows: of the measured passes, ascending.
        contexts: KV positions before them, ascending.
        pass_ms: one line for each entry of `rows`, one value for each of `contexts`: a pass over one sequence, with the
            logits of its last row.
        logits_ms: for each entry of `rows` what the logits of that many rows take beyond those of one.
        sequence_ms, context_ms: what each sequence after the first adds to its rows, and for each of its KV positions:
            rows of one sequence read its KV together, those of several do not.

    Raises:
        InvalidArgumentError: if these are no such tables.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    pass_ms: tuple[tuple[float, ...], ...]
    logits_ms: tuple[float, ...]
    sequence_ms: float = 0.0
    context_ms: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(a < b for axis in (self.rows, self.contexts) for a, b in pairwise(axis))
        if not self.rows or not self.contexts or not ascending or self.rows[0] < 1 or self.contexts[0] < 0:
            raise InvalidArgumentError("costs", "rows and contexts must be ascending lists")
        if len(self.pass_ms) != len(self.rows) or any(len(line) != len(self.contexts) for line in self.pass_ms):
            raise InvalidArgumentError("costs", f"pass_ms must have {len(self.rows)} lines of {len(self.contexts)}")
        if len(self.logits_ms) != len(self.rows):
            raise InvalidArgumentError("costs", f"logits_ms must have {len(self.rows)} values")
        if not all(math.isfinite(value) and value > 0 for line in self.pass_ms for value in line):
            raise InvalidArgumentError("costs", "a forward pass takes a positive time")
        if not all(v >= 0 for v in (*self.logits_ms, self.sequence_ms, self.context_ms)):
            raise InvalidArgumentError("costs", "nothing takes a negative time")

    def step_ms(self, parts: Sequence[PassRows]) -> float:
        """A pass over the rows of several sequences, at least one of them."""
        rows = sum(part.rows for part in parts)
        context = sum(part.rows * part.context for part in parts) / rows
        logits = sum(part.logits for part in parts)
        others = sum(part.context for part in parts) - max(part.context for part in parts)
        return (
            self._pass_ms(rows, context)
            + self._logits_ms(logits)
            + self.sequence_ms * (len(parts) - 1)
            + self.context_ms * others
        )

    def logits_pass_ms(self, rows: int) -> float:
        """A pass that begins a sequence, with the logits of all its rows: what a verifier measures at start-up."""
        return self.step_ms([PassRows(rows, 0, rows)])

    def prefill_pass_ms(self, rows: int, context: int) -> float:
        """A pass of so many rows without logits, after so many KV positions: likewise."""
        return self.step_ms([PassRows(rows, context, 0)])

    def with_rows_scaled(self, factor: float) -> StepCosts:
        """These costs, with what rows and logits take beyond the smallest measured pass multiplied by that."""
        first = self.pass_ms[0]
        passes = tuple(
            tuple(one + factor * (ms - one) for ms, one in zip(line, first, strict=True)) for line in self.pass_ms
        )
        return replace(self, pass_ms=passes, logits_ms=tuple(factor * ms for ms in self.logits_ms))

    def _pass_ms(self, rows: int, context: float) -> float:
        i, row_part = _between(self.rows, rows)
        j, context_part = _between(self.contexts, context)
        few, many = (_along(self.pass_ms[k], j, context_part) for k in (i, min(i + 1, len(self.rows) - 1)))
        return few + row_part * (many - few)

    def _logits_ms(self, rows: int) -> float:
        if rows <= 1:
            return 0.0
        i, part = _between(self.rows, rows)
        return _along(self.logits_ms, i, part)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepCosts:
        """From what `asdict` makes of one. Raises InvalidArgumentError if it is none."""
        try:
            return cls(
                tuple(record["rows"]),
                tuple(record["contexts"]),
                tuple(tuple(line) for line in record["pass_ms"]),
                tuple(record["logits_ms"]),
                record.get("sequence_ms", 0.0),
                record.get("context_ms", 0.0),
            )
        except KeyError as error:
            raise InvalidArgumentError("costs", f"{error} is missing") from None
        except TypeError as error:
            raise InvalidArgumentError("costs", f"no cost table: {error}") from None


def _between(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The measured point before a value, and its share of the way to the next; above 1 beyond the last."""
    if len(axis) == 1:
        return 0, 0.0
    i = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, max(0.0, (value - axis[i]) / (axis[i + 1] - axis[i]))


def _along(line: Sequence[float], j: int, part: float) -> float:
    return line[j] if part == 0.0 else line[j] + part * (line[j + 1] - line[j])


@dataclass(frozen=True)
class Overheads:
    """Times beside the forward pass, milliseconds: stated constants, of which fitting adjusts some.

    Attributes:
        network_ms: a frame's way between router and verifier, or between verifier and speculator.
        request_ms: from the client to the router's queue: transport, tokenising, admission.
        reply_ms: from the router's reading of a frame to the client's.
        step_ms: of a step, whatever it computes: planning, the event loop's turn, frames.
        turn_ms: of a step that is planned, beyond one that runs on from it; at 0 all steps are taken for planned ones.
        sequence_ms: of a step, for each of its sequences: acceptance and bookkeeping.
        draft_ms: a speculator's time for one tree. It draws them one after another.
    """

    network_ms: float = 0.3
    request_ms: float = 2.0
    reply_ms: float = 0.5
    step_ms: float = 0.4
    turn_ms: float = 0.0
    sequence_ms: float = 0.1
    draft_ms: float = 1.2

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidArgumentError(each.name, f"{value} is no duration")


@dataclass(frozen=True)
class MachineModel:
    """All that a simulated machine costs, and how well its drafters foresee what it is asked for.

    Attributes:
        origin: where the numbers come from.
        kinds: of text, by name; "" is the one for unknown names.
    """

    origin: str
    costs: StepCosts
    overheads: Overheads = field(default_factory=Overheads)
    kinds: Mapping[str, TextKind] = field(default_factory=lambda: KINDS)

    @classmethod
    def read(cls, path: Path) -> MachineModel:
        """Raises InvalidArgumentError if the file holds something else, OSError if it cannot be read."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            kinds = {name: TextKind(**kind) for name, kind in record.get("kinds", {}).items()}
            costs = StepCosts.from_json(record["costs"])
            return cls(str(record["origin"]), costs, Overheads(**record.get("overheads", {})), {**KINDS, **kinds})
        except KeyError as error:
            raise InvalidArgumentError("machine", f"{path}: {error} is missing") from None
        except (AttributeError, InvalidArgumentError, TypeError, ValueError) as error:
            raise InvalidArgumentError("machine", f"{path}: {error}") from None

    def write(self, path: Path) -> None:
        """Write what `read` reads."""
        record = {
            "origin": self.origin,
            "overheads": asdict(self.overheads),
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items() if KINDS.get(name) != kind},
            "costs": asdict(self.costs),
        }
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def kind(self, name: str) -> TextKind:
        """The kind of that name, or the one for unknown names."""
        return self.kinds.get(name, self.kinds[""])
