"""A whole router in this process, and a client that collects what it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.trace import Tracer, get_tracer
from prometheus_client import CollectorRegistry

from support.fake_verifier import MODEL_NAME, FakeVerifier
from support.tokenizer_folders import byte_level_bpe, write_folder
from support.verifier_peers import RunningVerifier
from support.waiting import until
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceStub
from treeserve_router.config import RouterConfig
from treeserve_router.main import RouterProcess
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.channel import open_channel
from treeserve_wire.tls import Tls

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def load_tokenizer(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """A byte-level tokenizer of about 300 tokens with an end-of-sequence token and a chat template."""
    return Tokenizer.from_folder(
        write_folder(byte_level_bpe(), folder, eos_token="<|im_end|>", chat_template=chat_template)
    )


@dataclass
class RouterRig:
    """A running router and a channel to it."""

    grpc: str
    http: str
    channel: grpc.aio.Channel
    registry: CollectorRegistry
    metrics: str

    @property
    def stub(self) -> Any:
        """Its gRPC API."""
        return InferenceServiceStub(self.channel)

    async def connected(self, num_verifiers: int) -> None:
        """Wait until it is connected to this many verifiers."""
        await until(lambda: self.metric("treeserve_router_verifiers") == num_verifiers)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if it does not exist yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def generate(self, request: pb.GenerateRequest, **options: Any) -> Collected:
        """Run a request to its end."""
        collected = Collected()
        async for response in self.stub.Generate(request, **options):
            collected.add(response)
        return collected


@dataclass
class Collected:
    """A stream as the client saw it; `add` checks that it keeps its promises."""

    started: pb.Started | None = None
    finished: pb.Finished | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[Any] = field(default_factory=list)
    chunks: list[pb.TokenChunk] = field(default_factory=list)

    def add(self, response: pb.GenerateResponse) -> None:
        """Take the next event."""
        assert self.finished is None, "an event after Finished"
        match response.WhichOneof("event"):
            case "started":
                assert self.started is None
                self.started = response.started
            case "chunk":
                assert self.started is not None
                if self.chunks:
                    assert response.chunk.offset == self.chunks[0].offset + len(self.token_ids), "a gap or a repeat"
                self.chunks.append(response.chunk)
                self.token_ids.extend(response.chunk.token_ids)
                self.text += response.chunk.text
                self.log_probs.extend(response.chunk.log_probs)
            case "finished":
                self.finished = response.finished


@asynccontextmanager
async def running_router(
    folder: Path,
    tokenizer: Tokenizer,
    connect: Sequence[FakeVerifier | RunningVerifier],
    tracer: Tracer | None = None,
    **changes: Any,
) -> AsyncIterator[RouterRig]:
    """Serve until the block ends, on a Unix socket and a free port; returns once connected to all of `connect`."""
    defaults: dict[str, Any] = {
        "model_folder": folder,
        "model_name": MODEL_NAME,
        "listen": f"unix:{folder}/router.sock",
        "http_listen": "127.0.0.1:0",
        "verifiers": tuple(verifier.address for verifier in connect),
        "router_id": "test",
        "verifier_wait_s": 5.0,
        "drain_s": 0.2,
        "redis_timeout_s": 10.0,  # a busy machine alone loses nothing
    }
    registry = CollectorRegistry()
    config = RouterConfig(**{**defaults, **changes})
    process = RouterProcess(config, tokenizer, tracer or get_tracer("test"), registry)
    tls = Tls.of(config.tls)
    async with process.running() as addresses, open_channel(addresses.grpc, tls) as channel:
        rig = RouterRig(addresses.grpc, addresses.http, channel, registry, addresses.metrics)
        await rig.connected(len(connect))
        yield rig
