"""The client SDK: sync and async generation over gRPC. Needs grpcio, grpcio-status and protobuf only."""

from treeserve_client.client import AsyncClient, Client
from treeserve_client.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    TreeserveClientError,
    Unauthenticated,
    Unavailable,
)
from treeserve_client.explanation import Decision, Explanation, PlacementCost
from treeserve_client.request import GenerateParams, Preset, ServiceClass
from treeserve_client.stream import AsyncStream, Stream
from treeserve_client.tls import TLS
from treeserve_client.types import (
    AcceptanceRule,
    Chunk,
    Completion,
    Model,
    PositionLogProbs,
    SpeculationStats,
    Started,
    Timing,
    Usage,
)

__all__ = [
    "TLS",
    "Aborted",
    "AcceptanceRule",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Decision",
    "Explanation",
    "GenerateParams",
    "Internal",
    "InvalidArgument",
    "Model",
    "NotFound",
    "PermissionDenied",
    "PlacementCost",
    "PositionLogProbs",
    "Preset",
    "ResourceExhausted",
    "ServiceClass",
    "SpeculationStats",
    "Started",
    "Stream",
    "Timing",
    "TreeserveClientError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
