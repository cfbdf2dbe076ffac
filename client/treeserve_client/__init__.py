"""The client SDK: sync and async generation over gRPC. Needs grpcio, grpcio-status and protobuf only."""

from treeserve_client.client import AsyncClient, AsyncStream, Client, Stream
from treeserve_client.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreeserveClientError,
    Unavailable,
)
from treeserve_client.request import GenerateParams, Preset
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
    "AcceptanceRule",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "GenerateParams",
    "Internal",
    "InvalidArgument",
    "Model",
    "NotFound",
    "PositionLogProbs",
    "Preset",
    "ResourceExhausted",
    "SpeculationStats",
    "Started",
    "Stream",
    "Timing",
    "TreeserveClientError",
    "Unavailable",
    "Usage",
]
