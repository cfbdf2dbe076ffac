"""A running request as the journal has it: the request as a verifier would get it, and its output in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve_core.errors import InvalidArgumentError
from treeserve_router.admission import RouterRequest
from treeserve_wire import codec

_REQUEST = b"request"
# One with a grammar. A router that knows none must not find it: it would run it without.
_CONSTRAINED = b"constrained_request"
_TOKEN = np.dtype("<u4")


@dataclass(frozen=True)
class JournalEntry:
    """A running request as the journal has it.

    Attributes:
        request: as it was admitted; its generated_token_ids are part of `output`.
        output: its output so far, or somewhat less.
    """

    request: RouterRequest
    output: tuple[int, ...]


def request_fields(request: RouterRequest) -> dict[bytes, bytes]:
    """The fields of a new record."""
    speculation, service_level = codec.limits_to_proto(request.limits)
    message = pb.SubmitSequence(
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
    return {_CONSTRAINED if request.has_grammar else _REQUEST: message.SerializeToString()}


def output_fields(offset: int, token_ids: Sequence[int]) -> dict[bytes, bytes]:
    """The field of more output, `offset` the output position of its first token. Writing it again changes nothing."""
    return {b"%d" % offset: np.asarray(token_ids, _TOKEN).tobytes()} if token_ids else {}


def parse_record(fields: Mapping[bytes, bytes]) -> JournalEntry | None:
    """The entry of a record; None if there is none, or one that this version cannot read."""
    try:
        message = pb.SubmitSequence.FromString(fields.get(_CONSTRAINED) or fields[_REQUEST])
        request = _request(message)
        pieces = {int(name): np.frombuffer(value, _TOKEN) for name, value in fields.items() if name.isdigit()}
    except (KeyError, ValueError, DecodeError, InvalidArgumentError):
        return None
    output: list[int] = []
    for offset in sorted(pieces):
        if offset != len(output):
            break
        output += pieces[offset].tolist()
    return JournalEntry(request, tuple(output))


def _request(message: pb.SubmitSequence) -> RouterRequest:
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
