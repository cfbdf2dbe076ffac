"""Service classes as policies: what a class is promised, and what it may be made to bear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import ServiceClass


@dataclass(frozen=True)
class QosPolicy:
    """What holds for the requests of one service class that say nothing else themselves.

    Attributes:
        ttft_ms, tpot_ms: targets for the time to the first token and per output token; None for no target.
        weight: share of service that a waiting request of the class is due, relative to other classes.
        reserved_slots: places of every verifier that only this class and more urgent ones may fill.
        preemptible: a more urgent request may pause its sequences.
        sheddable: its newcomers may be refused before the queue is full, when they would miss their targets anyway.
        max_nodes: most draft nodes a step verifies for a sequence; None leaves it to the planner.

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    weight: float = 1.0
    reserved_slots: int = 0
    preemptible: bool = False
    sheddable: bool = False
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidArgumentError(name, "must be a positive number of milliseconds")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidArgumentError("weight", "must be a positive number")
        if self.reserved_slots < 0:
            raise InvalidArgumentError("reserved_slots", "is negative")
        if self.max_nodes is not None and self.max_nodes < 0:
            raise InvalidArgumentError("max_nodes", "is negative")


DEFAULT_POLICIES: Mapping[ServiceClass, QosPolicy] = MappingProxyType(
    {
        ServiceClass.REALTIME: QosPolicy(ttft_ms=500, tpot_ms=30, weight=8, reserved_slots=1),
        ServiceClass.INTERACTIVE: QosPolicy(ttft_ms=1_500, tpot_ms=60, weight=4),
        ServiceClass.STANDARD: QosPolicy(ttft_ms=5_000, tpot_ms=120, weight=2, sheddable=True),
        ServiceClass.BATCH: QosPolicy(weight=1, preemptible=True, sheddable=True),
    }
)
