"""The client SDK: sync and async generation over gRPC. Needs grpcio and protobuf only."""
