"""Simulated clusters that are simple enough to calculate by hand."""

from __future__ import annotations

from typing import Any

from treeserve_simulator.costs import MachineModel, Overheads, StepCosts
from treeserve_simulator.systems import Cluster

NOTHING = Overheads(network_ms=0, request_ms=0, reply_ms=0, step_ms=0, turn_ms=0, sequence_ms=0, draft_ms=0)


def flat_machine(pass_ms: float, **overheads: float) -> MachineModel:
    """Every forward pass takes the same, and nothing else takes time unless it is named."""
    costs = StepCosts((1,), (0,), ((pass_ms,),), (0.0,))
    return MachineModel("a test", costs, Overheads(**{**NOTHING.__dict__, **overheads}))


def cpu_machine() -> MachineModel:
    """About what the int8 engine takes on one core."""
    rows = (1, 4, 8, 16, 32, 64)
    passes = ((4.5,), (5.0,), (6.3,), (8.8,), (14.5,), (26.0,))
    return MachineModel("a test", StepCosts(rows, (0,), passes, (0.0, 0.5, 0.9, 1.6, 3.0, 6.0)))


def small_cluster(machine: MachineModel, verifiers: int = 1, **verifier: Any) -> Cluster:
    """Tokens leave at once, so that a step's end is a token's arrival."""
    fields = {"emit_interval_ms": "0", **{name: str(value) for name, value in verifier.items()}}
    return Cluster(machine, verifiers, verifier=fields)
