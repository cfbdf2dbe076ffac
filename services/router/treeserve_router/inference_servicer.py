"""The public gRPC API: translates between its messages and the router."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import structlog

from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceServicer
from treeserve_router.admission import OPEN_ENDED, Ask, tenant_label
from treeserve_router.explain import DecisionLog
from treeserve_router.explain_messages import explanation_to_proto
from treeserve_router.front_door import current_caller, values_in
from treeserve_router.generation import Finished, GenerationEvent, Started
from treeserve_router.pool import ServedModel
from treeserve_router.router import Router
from treeserve_router.visible_output import TokenChunk
from treeserve_wire import codec
from treeserve_wire.status import abort

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

_log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(InferenceServiceServicer):
    """Serves InferenceService from a router of one model.

    Args:
        decisions: what Explain tells of.
    """

    def __init__(self, router: Router, model_name: str, decisions: DecisionLog) -> None:
        self._router = router
        self._decisions = decisions
        self._model_name = model_name

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Run a generation. Writing waits for a slow client, and for nobody else; a client that leaves cancels."""
        try:
            ask = _ask_from_proto(request, context)
            async with contextlib.aclosing(self._router.generate(ask)) as events:
                async for event in events:
                    await _write(context, self._event_to_proto(event))
        except _ClientGoneError as gone:
            _log.info("client gone", reason=str(gone.__cause__))
        except Exception as error:
            await abort(context, error)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        """List what can be served now."""
        return pb.ListModelsResponse(models=[_model_to_proto(model) for model in self._router.models()])

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: _Context
    ) -> pb.GetModelResponse:
        """Describe one model."""
        try:
            return pb.GetModelResponse(model=_model_to_proto(self._router.model(request.name)))
        except Exception as error:
            await abort(context, error)

    async def Explain(  # noqa: N802
        self, request: pb.ExplainRequest, context: _Context
    ) -> pb.ExplainResponse:
        """Say what was decided about a request of the caller's tenant."""
        try:
            tenant = current_caller().tenant
            label = None if tenant is None else tenant_label(tenant)
            return explanation_to_proto(self._decisions.explain(request.request_id, label))
        except Exception as error:
            await abort(context, error)

    def _event_to_proto(self, event: GenerationEvent) -> pb.GenerateResponse:
        match event:
            case Started(request_id, seed, prompt_tokens, acceptance, resumable):
                started = pb.Started(
                    request_id=request_id,
                    model=self._model_name,
                    seed=seed,
                    prompt_tokens=prompt_tokens,
                    acceptance=codec.acceptance_rule_to_proto(acceptance),
                    resumable=resumable,
                )
                return pb.GenerateResponse(started=started)
            case TokenChunk(offset, token_ids, text, log_probs):
                chunk = pb.TokenChunk(
                    offset=offset, token_ids=token_ids, text=text, log_probs=codec.log_probs_to_proto(log_probs)
                )
                return pb.GenerateResponse(chunk=chunk)
            case Finished():
                return pb.GenerateResponse(finished=_finished_to_proto(event))


class _ClientGoneError(Exception):
    """Nothing can be written to the client any more."""


async def _write(context: _Context, response: pb.GenerateResponse) -> None:
    try:
        await context.write(response)
    except Exception as error:
        raise _ClientGoneError from error


def _ask_from_proto(request: pb.GenerateRequest, context: _Context) -> Ask:
    caller = current_caller()
    values = values_in(context.invocation_metadata())
    remaining_s = context.time_remaining()
    kind = request.WhichOneof("input")
    return Ask(
        sampling=codec.sampling_from_proto(request.sampling),
        seed_given=request.sampling.HasField("seed"),
        stopping=codec.stopping_from_proto(request.stopping, OPEN_ENDED),
        limits=caller.levels.resolve(
            codec.limits_from_proto(request.speculation, request.service_level),
            class_given=bool(request.service_level.service_class),
            values=values,
        ),
        request_id=request.request_id,
        model=request.model,
        prompt=request.prompt if kind == "prompt" else None,
        messages=[{"role": m.role, "content": m.content} for m in request.chat.messages] if kind == "chat" else None,
        token_ids=request.tokens.token_ids if kind == "tokens" else None,
        resume_offset=request.resume.offset if kind == "resume" else None,
        generated_token_ids=request.generated_token_ids,
        session_id=request.session_id,
        deadline=None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s,
        traceparent=next(iter(values("traceparent")), ""),
        tenant=caller.tenant,
    )


def _finished_to_proto(finished: Finished) -> pb.Finished:
    return pb.Finished(
        reason=codec.finish_reason_to_proto(finished.reason),
        usage=pb.Usage(
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
        ),
        speculation=codec.stats_to_proto(finished.stats),
        stop_string=finished.stop_string,
    )


def _model_to_proto(model: ServedModel) -> pb.Model:
    return pb.Model(
        identity=codec.identity_to_proto(model.identity),
        max_context_tokens=model.max_context_tokens,
        verifiers=model.verifiers,
        dtype=model.dtype,
        speculators=model.speculators,
    )
