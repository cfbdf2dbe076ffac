"""The clients: thin sync and async shells around `Generation`."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_client.errors import from_rpc
from treeserve_client.generation import CallOptions, Generation
from treeserve_client.request import GenerateParams, build_request
from treeserve_client.types import Chunk, Completion, Model, Started

_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A router that comes back is found within seconds; gRPC's own default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_Self = TypeVar("_Self", bound="_StreamState")


class _StreamState:
    """What both kinds of stream show."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def started(self) -> Started | None:
        """What the router admitted: seed, prompt length, ids. None until it has, at the latest with the first chunk."""
        return self._generation.started

    @property
    def result(self) -> Completion:
        """The whole completion, once the iterator is exhausted. Raises RuntimeError before."""
        if self._generation.result is None:
            raise RuntimeError("the generation has not finished")
        return self._generation.result


class Stream(_StreamState):
    """Chunks of one generation. Iterate; leave the ``with`` block or call `close` to cancel what is not read."""

    def __init__(self, stub: Any, generation: Generation) -> None:
        super().__init__(generation)
        self._stub = stub
        self._closed = threading.Event()
        self._call = self._open()

    def _open(self) -> Any:
        return self._stub.Generate(self._generation.request, timeout=self._generation.remaining_s)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        """The next chunk; raises TreeserveClientError if the generation fails."""
        while not self._closed.is_set():
            try:
                event = next(self._call)
            except StopIteration:
                self._generation.check_ended()
                break
            except grpc.RpcError as error:
                self._recover(error)
                continue
            chunk = self._receive(event)
            if chunk is not None:
                return chunk
        raise StopIteration

    def _receive(self, event: inference_pb2.GenerateResponse) -> Chunk | None:
        try:
            return self._generation.receive(event)
        except BaseException:
            self.close()
            raise

    def _recover(self, error: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        delay_s = self._generation.resume_delay_s(error)
        if delay_s is None:
            self.close()
        elif not self._closed.wait(delay_s):
            self._call = self._open()

    def close(self) -> None:
        """Cancel the generation if it still runs; iteration ends. May be called from another thread, and again."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
