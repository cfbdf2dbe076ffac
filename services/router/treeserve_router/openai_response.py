"""The OpenAI-compatible responses: JSON objects of the two endpoints, whole and in pieces, and of errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from treeserve_core.errors import (
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    StaleEpochError,
    TreeserveError,
    UnauthenticatedError,
    UnavailableError,
)
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_router import answer_ids
from treeserve_router.generation import Finished
from treeserve_router.visible_output import TokenChunk
from treeserve_text.detokenizer import Detokenizer
from treeserve_text.tokenizer import Tokenizer

Json = dict[str, Any]

# Messages of the gRPC API whose fields are parameters of their own here.
_GROUPS = ("sampling", "stopping", "service_level", "chat", "tokens")
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "cancelled"}


@dataclass(frozen=True)
class Head:
    """What every object of one response repeats."""

    request_id: str
    created: int
    model: str
    seed: int


class Format(Protocol):
    """How one endpoint writes a generation."""

    def opening(self) -> Json | None:
        """The piece that opens a stream, if the endpoint has one."""

    def piece(self, chunk: TokenChunk) -> Json:
        """Tokens as a piece of a stream."""

    def closing(self, finished: Finished) -> Json:
        """The piece that ends a stream."""

    def usage(self, finished: Finished) -> Json:
        """The piece that carries usage."""

    def whole(self, chunks: list[TokenChunk], finished: Finished) -> Json:
        """The response that is not streamed."""


class CompletionFormat:
    """/v1/completions. `with_log_probs`: the request asked for them."""

    def __init__(self, head: Head, tokenizer: Tokenizer, with_log_probs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_log_probs = with_log_probs
        self._base = {"id": answer_ids.COMPLETION + head.request_id, "object": "text_completion", **_common(head)}
        self._seed = head.seed
        self._shown = Detokenizer(tokenizer)
        self._text_offset = 0

    def opening(self) -> Json | None:
        """None."""
        return None

    def piece(self, chunk: TokenChunk) -> Json:
        """Tokens as a piece of a stream."""
        return {**self._base, "choices": [self._choice(chunk.text, chunk.log_probs, None)]}

    def closing(self, finished: Finished) -> Json:
        """The piece that ends a stream."""
        return {**self._base, "choices": [self._choice("", (), finished)], **_extras(finished, self._seed)}

    def usage(self, finished: Finished) -> Json:
        """The piece that carries usage."""
        return {**self._base, "choices": [], "usage": _usage(finished)}

    def whole(self, chunks: list[TokenChunk], finished: Finished) -> Json:
        """The response that is not streamed."""
        log_probs = tuple(entry for chunk in chunks for entry in chunk.log_probs)
        choice = self._choice("".join(chunk.text for chunk in chunks), log_probs, finished)
        return {**self._base, "choices": [choice], "usage": _usage(finished), **_extras(finished, self._seed)}

    def _choice(self, text: str, log_probs: tuple[PositionLogProbs, ...], finished: Finished | None) -> Json:
        return {
            "index": 0,
            "text": text,
            "logprobs": self._log_probs(log_probs) if self._with_log_probs else None,
            "finish_reason": _REASONS[finished.reason] if finished is not None else None,
        }

    def _log_probs(self, positions: tuple[PositionLogProbs, ...]) -> Json:
        offsets = []
        for position in positions:
            offsets.append(self._text_offset)
            self._text_offset += len(self._shown.push([position.token_id]))
        return {
            "tokens": [_token_text(self._tokenizer, position.token_id) for position in positions],
            "token_logprobs": [position.log_prob for position in positions],
            "top_logprobs": [self._top(position) for position in positions],
            "text_offset": offsets,
        }

    def _top(self, position: PositionLogProbs) -> Json:
        """By text, of which the most probable token has it."""
        top: Json = {}
        for token_id, log_prob in position.top:
            top.setdefault(_token_text(self._tokenizer, token_id), log_prob)
        return top


class ChatFormat:
    """/v1/chat/completions. `with_log_probs`: the request asked for them."""

    def __init__(self, head: Head, tokenizer: Tokenizer, with_log_probs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_log_probs = with_log_probs
        self._id = answer_ids.CHAT + head.request_id
        self._common = _common(head)
        self._seed = head.seed

    def opening(self) -> Json | None:
        """The piece that names the role."""
        return self._piece({"role": "assistant", "content": ""}, (), None)

    def piece(self, chunk: TokenChunk) -> Json:
        """Tokens as a piece of a stream."""
        return self._piece({"content": chunk.text}, chunk.log_probs, None)

    def closing(self, finished: Finished) -> Json:
        """The piece that ends a stream."""
        return {**self._piece({}, (), finished), **_extras(finished, self._seed)}

    def usage(self, finished: Finished) -> Json:
        """The piece that carries usage."""
        return {**self._piece({}, (), None), "choices": [], "usage": _usage(finished)}

    def whole(self, chunks: list[TokenChunk], finished: Finished) -> Json:
        """The response that is not streamed."""
        log_probs = tuple(entry for chunk in chunks for entry in chunk.log_probs)
        message = {"role": "assistant", "content": "".join(chunk.text for chunk in chunks)}
        choice = {"index": 0, "message": message, **self._rest(log_probs, finished)}
        return {
            "id": self._id,
            "object": "chat.completion",
            **self._common,
            "choices": [choice],
            "usage": _usage(finished),
            **_extras(finished, self._seed),
        }

    def _piece(self, delta: Json, log_probs: tuple[PositionLogProbs, ...], finished: Finished | None) -> Json:
        choice = {"index": 0, "delta": delta, **self._rest(log_probs, finished)}
        return {"id": self._id, "object": "chat.completion.chunk", **self._common, "choices": [choice]}

    def _rest(self, log_probs: tuple[PositionLogProbs, ...], finished: Finished | None) -> Json:
        content = [self._position(position) for position in log_probs]
        return {
            "logprobs": {"content": content} if self._with_log_probs else None,
            "finish_reason": _REASONS[finished.reason] if finished is not None else None,
        }

    def _position(self, position: PositionLogProbs) -> Json:
        top = [self._entry(token_id, log_prob) for token_id, log_prob in position.top]
        return {**self._entry(position.token_id, position.log_prob), "top_logprobs": top}

    def _entry(self, token_id: int, log_prob: float) -> Json:
        return {
            "token": _token_text(self._tokenizer, token_id),
            "logprob": log_prob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


@dataclass(frozen=True)
class ErrorResponse:
    """An error in OpenAI's shape and the HTTP status and headers that go with it."""

    status: int
    body: Json
    headers: dict[str, str]


def error_response(error: BaseException) -> ErrorResponse:
    """What a client is told. Errors that are not ours become a 500 and their message stays here."""
    match error:
        case InvalidArgumentError():
            return _error(400, "invalid_request_error", str(error), param=_parameter(error.field))
        case NotFoundError():
            return _error(404, "invalid_request_error", str(error), param="model", code="model_not_found")
        case OverloadedError():
            headers = {"retry-after": str(max(math.ceil(error.retry_after_s), 1))}
            code = "rate_limit_exceeded" if error.cause.startswith("quota") else "overloaded"
            return _error(429, "rate_limit_error", str(error), code=code, headers=headers)
        case UnauthenticatedError():
            headers = {"www-authenticate": "Bearer"}
            return _error(401, "authentication_error", str(error), code="invalid_api_key", headers=headers)
        case PermissionDeniedError():
            return _error(403, "permission_error", str(error), code="permission_denied")
        case StaleEpochError():
            return _error(409, "invalid_request_error", str(error), param="session_id", code="stale_epoch")
        case UnavailableError():
            return _error(503, "service_unavailable_error", str(error), code="unavailable")
        case TimeoutError():
            return _error(504, "timeout_error", str(error), code="timeout")
        case TreeserveError():
            return _error(500, "internal_error", str(error))
        case _:
            return _error(500, "internal_error", "internal error")


def _parameter(field: str) -> str:
    """OpenAI's flat name for a field of the public gRPC API."""
    group, dot, rest = field.partition(".")
    return rest if dot and group in _GROUPS else field


def http_error(status: int, message: str) -> ErrorResponse:
    """An error of HTTP itself, such as an unknown path."""
    return _error(status, "invalid_request_error", message)


def _error(
    status: int, kind: str, message: str, *, param: str = "", code: str = "", headers: dict[str, str] | None = None
) -> ErrorResponse:
    body = {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}
    return ErrorResponse(status, body, headers or {})


def _common(head: Head) -> Json:
    return {"created": head.created, "model": head.model}


def _usage(finished: Finished) -> Json:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


def _extras(finished: Finished, seed: int) -> Json:
    """Extensions: the seed that gives the same tokens again (under acceptance by replay), and what speculation did."""
    return {"seed": seed, "metrics": {"speculative_decoding": _speculation(finished.stats)}}


def _speculation(stats: SpeculationStats) -> Json:
    return {
        "num_drafts": stats.steps,
        "num_draft_tokens": stats.drafted,
        "num_accepted_tokens": stats.accepted,
        "num_accepted_tokens_per_pos": stats.accepted_per_depth,
        "acceptance": stats.acceptance.label,
        "lossy": stats.acceptance.is_lossy,
    }


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token adds to the text: `bytes:` and these where they are no whole characters; a special token's name."""
    data = tokenizer.token_bytes(token_id)
    if not data:
        return tokenizer.decode([token_id], skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
