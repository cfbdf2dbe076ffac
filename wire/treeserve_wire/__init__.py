"""How treeserve's services speak gRPC: codec, servers and channels, credits, status mapping, telemetry."""
