"""What a router tells of a request's way through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2
from treeserve_client.request import ServiceClass

DecisionKind = Literal[
    "queued", "refused", "blocked", "placed", "hedged", "first_token", "replayed", "ended", "unspecified"
]


@dataclass(frozen=True)
class PlacementCost:
    """What a request was expected to cost on the verifier that was chosen, seconds: the lowest sum is chosen.

    Attributes:
        wait_s: until the running step and the prompts before it are done.
        prefill_s: its own prompt, without what the verifier holds already.
        load_s: sharing the verifier.
        slow_s: tokens that take longer than the fastest verifier's.
        affinity_s: negative where its session ran last.
    """

    wait_s: float
    prefill_s: float
    load_s: float
    slow_s: float
    affinity_s: float


@dataclass(frozen=True)
class Decision:
    """One decision about a request.

    Attributes:
        at_s: when, in seconds after the first one.
        reason: for people.
        verifier_id: whom it concerns; empty for none.
        cost: of a placement.
        repeats: how often the same was decided again in a row.
    """

    kind: DecisionKind
    at_s: float
    reason: str
    verifier_id: str
    cost: PlacementCost | None
    repeats: int

    @classmethod
    def from_proto(cls, msg: inference_pb2.Decision) -> Decision:
        """Decode. A kind that this client does not know is "unspecified"."""
        known = msg.kind in inference_pb2.DecisionKind.values()
        name = inference_pb2.DecisionKind.Name(msg.kind) if known else "DECISION_KIND_UNSPECIFIED"
        kind = cast("DecisionKind", name.removeprefix("DECISION_KIND_").lower())
        cost = msg.cost
        parts = PlacementCost(cost.wait_s, cost.prefill_s, cost.load_s, cost.slow_s, cost.affinity_s)
        return cls(kind, msg.at_s, msg.reason, msg.verifier_id, parts if msg.HasField("cost") else None, msg.repeats)


@dataclass(frozen=True)
class Explanation:
    """What one router decided about a request: another one that ran it too has its own to tell.

    Attributes:
        age_s: time since the first decision.
        decisions: the latest, oldest first.
        dropped: older ones that are forgotten.
    """

    request_id: str
    router_id: str
    service_class: ServiceClass
    age_s: float
    decisions: tuple[Decision, ...]
    dropped: int

    @classmethod
    def from_proto(cls, msg: inference_pb2.ExplainResponse) -> Explanation:
        """Decode."""
        name = common_pb2.ServiceClass.Name(msg.service_class).removeprefix("SERVICE_CLASS_").lower()
        return cls(
            request_id=msg.request_id,
            router_id=msg.router_id,
            service_class=cast("ServiceClass", name),
            age_s=msg.age_s,
            decisions=tuple(map(Decision.from_proto, msg.decisions)),
            dropped=msg.dropped,
        )
