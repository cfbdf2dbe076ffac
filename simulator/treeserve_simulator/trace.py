"""Traces: who asks for how many tokens and when, one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.identity import MAX_SESSION_CHARS
from treeserve_core.sampling import ServiceClass
from treeserve_router.qos import class_named

T = TypeVar("T")


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
        if len(self.session) > MAX_SESSION_CHARS:
            raise InvalidArgumentError("session", f"has more than {MAX_SESSION_CHARS} characters")
        for name in ("tenant", "session"):
            if not _is_unicode(getattr(self, name)):
                raise InvalidArgumentError(name, "has half of a surrogate pair: it is no Unicode text")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TraceRequest:
        """A line's object; fields that belong to others (such as a measured result) are left alone.

        Raises:
            InvalidArgumentError: naming the field that is missing or has no sense.
        """
        return cls(
            at_s=_number(record, "at_s", float),
            prompt_tokens=_number(record, "prompt_tokens", int),
            output_tokens=_number(record, "output_tokens", int),
            service_class=class_named(str(record.get("service_class", "standard")).lower(), "service_class"),
            tenant=_text(record, "tenant"),
            kind=_text(record, "kind"),
            session=_text(record, "session"),
        )

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
        InvalidArgumentError: naming the line that is none, and its field; or if there is none.
        OSError: if the file cannot be read.
    """
    requests = read_lines(path, TraceRequest.from_json)
    if not requests:
        raise InvalidArgumentError("trace", f"{path} holds no request")
    return sorted(requests, key=lambda request: request.at_s)


def read_lines(path: Path, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """What the lines of a JSONL file stand for, one object each.

    Args:
        read: makes it of an object, or raises InvalidArgumentError.

    Raises:
        InvalidArgumentError: naming the file, the line and its field.
        OSError: if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("trace", f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    made = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (RecursionError, ValueError):
            record = None
        if not isinstance(record, dict):
            raise InvalidArgumentError("trace", f"{path}, line {number}: is no JSON object")
        try:
            made.append(read(record))
        except InvalidArgumentError as error:
            raise InvalidArgumentError("trace", f"{path}, line {number}: {error}") from None
    return made


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a file that `read_trace` reads."""
    lines = [json.dumps(request.to_json()) for request in requests]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _number(record: Mapping[str, Any], name: str, kind: Callable[[Any], T]) -> T:
    if name not in record:
        raise InvalidArgumentError(name, "is missing")
    try:
        return kind(record[name])
    except (OverflowError, TypeError, ValueError):
        raise InvalidArgumentError(name, "must be a number") from None


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return "" if value is None else str(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
