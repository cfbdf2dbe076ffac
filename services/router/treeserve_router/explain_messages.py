"""Explanations as messages of the public API."""

from __future__ import annotations

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_router.explain import Decision, Explanation


def explanation_to_proto(explanation: Explanation) -> pb.ExplainResponse:
    """Encode."""
    return pb.ExplainResponse(
        request_id=explanation.request_id,
        router_id=explanation.router_id,
        service_class=common_pb2.ServiceClass.ValueType(explanation.service_class),
        age_s=explanation.age_s,
        decisions=[_decision_to_proto(decision, explanation.began) for decision in explanation.decisions],
        dropped=explanation.dropped,
    )


def _decision_to_proto(decision: Decision, began: float) -> pb.Decision:
    return pb.Decision(
        kind=pb.DecisionKind.Value(f"DECISION_KIND_{decision.kind.name}"),
        at_s=decision.at - began,
        reason=decision.reason,
        verifier_id=decision.verifier_id,
        cost=None if decision.cost is None else pb.PlacementCost(**decision.cost._asdict()),
        repeats=decision.repeats,
    )
