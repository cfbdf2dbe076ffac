"""Traces: who asks for how many tokens and when, one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import ServiceClass
from treeserve_router.qos import class_named

_REQUIRED = ("at_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at_s: seconds from the beginning of the trace to its arrival. A turn of a session arrives later if the turn
            before it has not ended by then.
        prompt_tokens: length of the prompt; for a later turn of a session all of the conversation so far is part of it.
        output_tokens: how many tokens it generates.
        tenant: whom it is for; empty where all requests are one tenant's.
        kind: what kind of text it is, which decides how well it can be drafted; empty for the default.
        session: the conversation it is a turn of; empty for none.

    Raises:
        InvalidArgumentError: for a value that no request can have.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    service_class: ServiceClass = ServiceClass.STANDARD
    tenant: str = ""
    kind: str = ""
    session: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_s) and self.at_s >= 0):
            raise InvalidArgumentError("at_s", "must be a number of seconds, not negative")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(name, "must be at least 1")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TraceRequest:
        """A line's object; fields that belong to others (such as a measured result) are left alone.

        Raises:
            InvalidArgumentError: if a field is missing or has no sense.
        """
        try:
            for name in _REQUIRED:
                if name not in record:
                    raise InvalidArgumentError(name, "is missing")
            return cls(
                at_s=float(record["at_s"]),
                prompt_tokens=int(record["prompt_tokens"]),
                output_tokens=int(record["output_tokens"]),
                service_class=class_named(str(record.get("service_class", "standard")).lower(), "service_class"),
                tenant=str(record.get("tenant", "")),
                kind=str(record.get("kind", "")),
                session=str(record.get("session", "")),
            )
        except (InvalidArgumentError, OverflowError, TypeError, ValueError) as error:
            raise InvalidArgumentError("trace", f"{error}; the line is {dict(record)}") from None

    def to_json(self) -> dict[str, Any]:
        """The object of its line."""
        record: dict[str, Any] = {
            "at_s": round(self.at_s, 6),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "service_class": self.service_class.name.lower(),
            "tenant": self.tenant,
            "kind": self.kind,
        }
        return record | ({"session": self.session} if self.session else {})


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file, in order of arrival.

    Raises:
        InvalidArgumentError: quoting the line that is none, or if there is none.
        OSError: if the file cannot be read.
    """
    requests = [TraceRequest.from_json(record) for record in read_records(path)]
    if not requests:
        raise InvalidArgumentError("trace", f"{path} holds no request")
    return sorted(requests, key=lambda request: request.at_s)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, one a line.

    Raises:
        InvalidArgumentError: naming the line that is none.
        OSError: if the file cannot be read.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (RecursionError, ValueError):
            record = None
        if not isinstance(record, dict):
            raise InvalidArgumentError("trace", f"line {number} of {path} is no JSON object")
        records.append(record)
    return records


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a file that `read_trace` reads."""
    lines = [json.dumps(request.to_json()) for request in requests]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
