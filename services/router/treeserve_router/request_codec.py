"""A request as verifiers and the journal are told of it, whatever its output so far."""

from __future__ import annotations

from dataclasses import replace

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve_router.admission import RouterRequest
from treeserve_wire import codec


def request_to_proto(request: RouterRequest) -> pb.SubmitSequence:
    """Encode all but what changes from run to run."""
    speculation, service_level = codec.limits_to_proto(request.limits)
    return pb.SubmitSequence(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=codec.sampling_to_proto(request.sampling),
        stopping=codec.stopping_to_proto(request.stopping),
        speculation=speculation,
        service_level=service_level,
        tenant=request.tenant,
        session_id=request.session_id,
        preemptible=request.limits.preemptible,
    )


def request_from_proto(message: pb.SubmitSequence) -> RouterRequest:
    """Decode it, without output. Raises InvalidArgumentError for what no request can be."""
    limits = codec.limits_from_proto(message.speculation, message.service_level)
    return RouterRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        generated_token_ids=(),
        sampling=codec.sampling_from_proto(message.sampling),
        stopping=codec.stopping_from_proto(message.stopping, max_tokens_default=0),
        limits=replace(limits, preemptible=message.preemptible),
        session_id=message.session_id,
        tenant=message.tenant,
    )
