"""KEDA's external scaler: how many replicas a role wants, as a metric whose target is one for each replica."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc

from treeserve.keda import externalscaler_pb2 as pb
from treeserve.keda.externalscaler_pb2_grpc import ExternalScalerServicer
from treeserve_core.errors import InvalidArgumentError, NotFoundError
from treeserve_router.autoscaling import Autoscaler, Role
from treeserve_wire.status import abort

_Context = grpc.aio.ServicerContext[Any, Any]


class ScalerServicer(ExternalScalerServicer):
    """Answers for the role that a trigger's metadata names: ``role: verifier``.

    What is not known is an error and never 0: KEDA falls back, or the autoscaler leaves the replicas as they are.
    """

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    async def IsActive(  # noqa: N802
        self, request: pb.ScaledObjectRef, context: _Context
    ) -> pb.IsActiveResponse:
        """Always: nothing is scaled to zero."""
        return pb.IsActiveResponse(result=True)

    async def StreamIsActive(  # noqa: N802
        self, request: pb.ScaledObjectRef, context: _Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """The same, once: it never changes, and a stream that is held open would hold up the drain."""
        yield pb.IsActiveResponse(result=True)

    async def GetMetricSpec(  # noqa: N802
        self, request: pb.ScaledObjectRef, context: _Context
    ) -> pb.GetMetricSpecResponse:
        """One metric, which is known before its value is."""
        try:
            spec = pb.MetricSpec(metricName=_metric_name(_role(request)), targetSize=1, targetSizeFloat=1.0)
            return pb.GetMetricSpecResponse(metricSpecs=[spec])
        except Exception as error:
            await abort(context, error)

    async def GetMetrics(  # noqa: N802
        self, request: pb.GetMetricsRequest, context: _Context
    ) -> pb.GetMetricsResponse:
        """Replicas wanted."""
        try:
            role = _role(request.scaledObjectRef)
            name = _metric_name(role)
            if request.metricName != name:
                raise NotFoundError(f"the metric of role {role} is {name}")
            wanted = self._autoscaler.wanted(role)
            value = pb.MetricValue(metricName=name, metricValue=math.ceil(wanted), metricValueFloat=wanted)
            return pb.GetMetricsResponse(metricValues=[value])
        except Exception as error:
            await abort(context, error)


def _role(scaled: pb.ScaledObjectRef) -> Role:
    name = scaled.scalerMetadata.get("role", "")
    try:
        return Role(name)
    except ValueError:
        raise InvalidArgumentError("role", f"{name[:40]!r} is none of {', '.join(Role)}") from None


def _metric_name(role: Role) -> str:
    return f"treeserve-wanted-{role}s"
