"""The OpenAI-compatible HTTP API, with health and metrics, in the router's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from treeserve_core.errors import InvalidArgumentError, TreeserveError
from treeserve_router.front_door import FrontDoor, HttpDoor, current_caller
from treeserve_router.generation import Finished, GenerationEvent, Started
from treeserve_router.openai_request import ChatCompletionRequest, CompletionRequest
from treeserve_router.openai_response import (
    ChatFormat,
    CompletionFormat,
    ErrorResponse,
    Format,
    Head,
    Json,
    error_response,
    http_error,
)
from treeserve_router.pool import ServedModel
from treeserve_router.router import Router
from treeserve_router.visible_output import TokenChunk
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.tasks import until_first_ends

# A prompt of 1 MiB may be several times that as JSON.
_MAX_BODY_BYTES = 8 << 20
_BODY_TIMEOUT_S = 30.0

_Call = CompletionRequest | ChatCompletionRequest
_Events = AsyncGenerator[GenerationEvent, None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class HttpParts:
    """What the HTTP API works with.

    Attributes:
        door: lets callers in.
        wall_clock: seconds since the epoch.
    """

    router: Router
    tokenizer: Tokenizer
    model_name: str
    registry: CollectorRegistry
    door: FrontDoor
    wall_clock: Callable[[], float] = time.time


def build_app(parts: HttpParts) -> Starlette:
    """The ASGI application."""

    async def models(_: Request) -> Response:
        created = int(parts.wall_clock())
        data = [_model_json(model, created) for model in parts.router.models()]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        try:
            served = parts.router.model(request.path_params["name"])
        except TreeserveError as error:
            return _json_error(error_response(error))
        return JSONResponse(_model_json(served, int(parts.wall_clock())))

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        is_ready = parts.router.is_ready
        return PlainTextResponse("ready\n" if is_ready else "no verifier is connected\n", 200 if is_ready else 503)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json_error(http_error(error.status_code, error.detail))

    completions = GenerationEndpoint(parts, CompletionRequest, CompletionFormat)
    chat_completions = GenerationEndpoint(parts, ChatCompletionRequest, ChatFormat)
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/healthz", healthy),
            Route("/readyz", ready),
            _metrics_route(parts.registry),
        ],
        middleware=[Middleware(HttpDoor, door=parts.door)],
        exception_handlers={HTTPException: refused},
    )


def build_metrics_app(registry: CollectorRegistry) -> Starlette:
    """The application of a port that has metrics and nothing else, and asks nobody for a key."""
    return Starlette(routes=[_metrics_route(registry)])


def _metrics_route(registry: CollectorRegistry) -> Route:
    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", metrics)


class GenerationEndpoint:
    """An ASGI endpoint that runs one generation; a client that goes away cancels it.

    Args:
        schema: what the endpoint understands.
        make_format: how it answers.
    """

    def __init__(
        self,
        parts: HttpParts,
        schema: type[CompletionRequest] | type[ChatCompletionRequest],
        make_format: Callable[[Head, Tokenizer, bool], Format],
    ) -> None:
        self._parts = parts
        self._schema = schema
        self._make_format = make_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            http_request = Request(scope, receive)
            call = self._schema.from_json(await _read_json(http_request))
            ask = call.to_ask(http_request.headers.get("traceparent", ""))
            caller = current_caller()
            ask = replace(
                ask,
                limits=caller.levels.resolve(
                    ask.limits, class_given=call.class_given, values=http_request.headers.getlist
                ),
                tenant=caller.tenant,
            )
        except (TreeserveError, HTTPException) as error:
            await _json_error(_error_response(error))(scope, receive, send)
            return
        except ClientDisconnect:
            return
        exchange = _Exchange(scope, receive, send)
        events = self._parts.router.generate(ask)
        answer = self._stream(call, events, exchange) if call.stream else self._whole(call, events, exchange)
        await _while_connected(receive, answer)

    async def _whole(self, call: _Call, events: _Events, exchange: _Exchange) -> None:
        chunks: list[TokenChunk] = []
        try:
            async with contextlib.aclosing(events):
                answer = self._format(call, await anext(events))
                async for event in events:
                    if isinstance(event, TokenChunk):
                        chunks.append(event)
                    elif isinstance(event, Finished):
                        body = answer.whole(chunks, event)
        except Exception as error:
            await exchange.respond(_json_error(_error_response(call.named(error))))
            return
        await exchange.respond(JSONResponse(body))

    async def _stream(self, call: _Call, events: _Events, exchange: _Exchange) -> None:
        """Server-sent events. The status waits for the first tokens, so that a refusal still has its own."""
        async with contextlib.aclosing(events):
            try:
                answer = self._format(call, await anext(events))
                event = await anext(events)
            except Exception as error:
                await exchange.respond(_json_error(_error_response(call.named(error))))
                return
            await exchange.start_events()
            if (opening := answer.opening()) is not None:
                await exchange.send_event(opening)
            try:
                while True:
                    for piece in _pieces(answer, event, call.stream_options.include_usage):
                        await exchange.send_event(piece)
                    if isinstance(event, Finished):
                        break
                    event = await anext(events)
            except Exception as error:
                await exchange.send_event(_error_response(call.named(error)).body)
        await exchange.end_events()

    def _format(self, call: _Call, started: GenerationEvent) -> Format:
        assert isinstance(started, Started)
        created = int(self._parts.wall_clock())
        head = Head(started.request_id, created, self._parts.model_name, started.seed)
        with_log_probs = call.logprobs is not None and call.logprobs is not False
        return self._make_format(head, self._parts.tokenizer, with_log_probs)


class _Exchange:
    """The response side of one HTTP request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send

    async def respond(self, response: Response) -> None:
        """Send a whole response."""
        await response(self._scope, self._receive, self._send)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_event(self, body: Json) -> None:
        """Send one event."""
        await self._send_data(json.dumps(body, ensure_ascii=False, separators=(",", ":")), more=True)

    async def end_events(self) -> None:
        """End the stream the way OpenAI's clients expect."""
        await self._send_data("[DONE]", more=False)

    async def _send_data(self, data: str, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})


def _pieces(answer: Format, event: GenerationEvent, include_usage: bool) -> Iterator[Json]:
    if isinstance(event, TokenChunk) and (event.text or event.log_probs):
        yield answer.piece(event)
    if isinstance(event, Finished):
        yield answer.closing(event)
        if include_usage:
            yield answer.usage(event)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client goes away."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    await until_first_ends(work, disconnected())


async def _read_json(request: Request) -> object:
    """The decoded body. Raises HTTPException for one that is too large or does not come, and for what is no JSON."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is longer than {_MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body was not there after {_BODY_TIMEOUT_S:g} s") from None
    try:
        value: object = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError):
        raise InvalidArgumentError("body", "is not JSON, or not Unicode, or nested too deeply") from None
    return value


def _error_response(error: Exception) -> ErrorResponse:
    if isinstance(error, HTTPException):
        return http_error(error.status_code, error.detail)
    if not isinstance(error, TreeserveError | TimeoutError):
        _log.error("request failed", exc_info=error)
    return error_response(error)


def _json_error(error: ErrorResponse) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


def _model_json(model: ServedModel, created: int) -> Json:
    return {
        "id": model.identity.name,
        "object": "model",
        "created": created,
        "owned_by": "treeserve",
        "max_model_len": model.max_context_tokens,
    }
