"""An InferenceService without verifiers: plays what a test scripts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc

SEED = 2**63 + 5
TOKENS = [10, 11, 12, 13, 14]


def started(request: inference_pb2.GenerateRequest, **changes: Any) -> inference_pb2.GenerateResponse:
    fields: dict[str, Any] = {
        "request_id": request.request_id or "drawn-by-router",
        "model": "m",
        "seed": request.sampling.seed if request.sampling.HasField("seed") else SEED,
        "prompt_tokens": 3,
    }
    return inference_pb2.GenerateResponse(started=inference_pb2.Started(**(fields | changes)))


def chunk(offset: int, token_ids: list[int], text: str | None = None) -> inference_pb2.GenerateResponse:
    text = "".join(f"<{t}>" for t in token_ids) if text is None else text
    log_probs = [
        common_pb2.PositionLogProbs(
            chosen=common_pb2.TokenLogProb(token_id=t, log_prob=-0.5),
            top=[common_pb2.TokenLogProb(token_id=t + 1, log_prob=-0.25)],
        )
        for t in token_ids
    ]
    return inference_pb2.GenerateResponse(
        chunk=inference_pb2.TokenChunk(offset=offset, token_ids=token_ids, text=text, log_probs=log_probs)
    )


def finished(completion_tokens: int = len(TOKENS)) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            reason=common_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=completion_tokens),
            speculation=common_pb2.SpeculationStats(steps=2, drafted=8, accepted=3, accepted_per_depth=[2, 1]),
            stop_string="END",
        )
    )


def fail(code: grpc.StatusCode, message: str, *details: Any) -> Callable[[grpc.ServicerContext], None]:
    """A script step that ends the call."""

    def step(context: grpc.ServicerContext) -> None:
        status = Status(code=code.value[0], message=message)
        for detail in details:
            status.details.add().Pack(detail)
        context.abort_with_status(rpc_status.to_status(status))

    return step


class Unreachable(grpc.RpcError):
    """What a call ends with where nobody listens."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> None:
        return None


@contextmanager
def serving(router: inference_pb2_grpc.InferenceServiceServicer) -> Iterator[str]:
    """Serve until the block ends; yields the address."""
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Plays one script a call: responses to send and steps to run."""

    def __init__(self) -> None:
        self.scripts: list[Callable[[inference_pb2.GenerateRequest], list[Any]]] = []
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        context.add_callback(self.cancelled.set)
        self.requests.append(request)
        for step in self.scripts.pop(0)(request):
            if callable(step):
                step(context)
            else:
                yield step

    def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        identity = common_pb2.ModelIdentity(name="m", tokenizer_hash="ab", vocab_size=300, eos_token_ids=[2])
        model = inference_pb2.Model(identity=identity, max_context_tokens=2048, verifiers=1, dtype="float32")
        return inference_pb2.ListModelsResponse(models=[model])

    def GetModel(self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext) -> Any:
        fail(grpc.StatusCode.NOT_FOUND, f"no model {request.name!r}")(context)

    def play(self, *steps: Any) -> None:
        """The next call starts and then plays these steps."""
        self.scripts.append(lambda request: [started(request), *steps])
