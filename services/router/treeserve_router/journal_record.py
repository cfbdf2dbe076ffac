"""A running request as the journal has it: the request as a verifier would get it, and its output in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from treeserve.verifier.v1 import verifier_pb2 as pb
from treeserve_core.errors import InvalidArgumentError
from treeserve_router.admission import RouterRequest
from treeserve_router.request_codec import request_from_proto, request_to_proto

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
    return {_CONSTRAINED if request.has_grammar else _REQUEST: request_to_proto(request).SerializeToString()}


def output_fields(offset: int, token_ids: Sequence[int]) -> dict[bytes, bytes]:
    """The field of more output, `offset` the output position of its first token. Writing it again changes nothing."""
    return {b"%d" % offset: np.asarray(token_ids, _TOKEN).tobytes()} if token_ids else {}


def parse_record(fields: Mapping[bytes, bytes]) -> JournalEntry | None:
    """The entry of a record; None if there is none, or one that this version cannot read."""
    try:
        message = pb.SubmitSequence.FromString(fields.get(_CONSTRAINED) or fields[_REQUEST])
        request = request_from_proto(message)
        pieces = {int(name): np.frombuffer(value, _TOKEN) for name, value in fields.items() if name.isdigit()}
    except (KeyError, ValueError, DecodeError, InvalidArgumentError):
        return None
    output: list[int] = []
    for offset in sorted(pieces):
        if offset != len(output):
            break
        output += pieces[offset].tolist()
    return JournalEntry(request, tuple(output))
