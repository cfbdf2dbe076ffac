"""What both edges call: generate text for an ask, and say which model is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import structlog
from opentelemetry.trace import Span, Status, StatusCode, Tracer, format_trace_id

from treeserve_core.errors import NotFoundError, TreeserveError, UnavailableError
from treeserve_router.admission import Admission, Ask
from treeserve_router.generation import Finished, Generation, GenerationEvent, GenerationParts, Started
from treeserve_router.metrics import RequestMeter
from treeserve_router.pool import ServedModel, VerifierPool
from treeserve_router.store import SessionStore
from treeserve_router.visible_output import TokenChunk
from treeserve_wire.telemetry import context_from

_log = structlog.get_logger(__name__)


class Router:
    """Admits requests and runs them.

    Args:
        parts: what generations work with.
        verifier_wait_s: longest time a request waits for the first verifier's limits.
        clock: seconds, monotonic; the event loop's own.
    """

    def __init__(
        self,
        admission: Admission,
        pool: VerifierPool,
        parts: GenerationParts,
        store: SessionStore,
        tracer: Tracer,
        *,
        verifier_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._pool = pool
        self._parts = parts
        self._store = store
        self._tracer = tracer
        self._verifier_wait_s = verifier_wait_s
        self._clock = clock
        self._active: dict[str, Generation] = {}

    @property
    def is_ready(self) -> bool:
        """Whether at least one verifier can take work."""
        return self._pool.is_serving

    def model(self, name: str) -> ServedModel:
        """The served model. Raises NotFoundError if no verifier serves it or it has another name."""
        served = self._pool.served_model()
        if served is None or served.identity.name != name:
            raise NotFoundError(f"no verifier serves a model {name!r}")
        return served

    def models(self) -> list[ServedModel]:
        """All models that can be served now."""
        served = self._pool.served_model()
        return [served] if served is not None else []

    async def generate(self, ask: Ask) -> AsyncGenerator[GenerationEvent, None]:
        """Run an ask: one Started, chunks, one Finished. Closing the generator cancels it.

        A newer ask with the same request id takes over: its client came back before this side saw the old stream
        break, and the older generation ends as cancelled.

        Raises:
            TreeserveError: if it is refused or fails.
            TimeoutError: when its deadline passes.
        """
        meter = RequestMeter(self._parts.metrics, ask.limits, self._clock)
        span = self._tracer.start_span("treeserve.generate", context=context_from(ask.traceparent))
        log = _log.bind(trace_id=format_trace_id(span.get_span_context().trace_id))
        rule = ask.limits.acceptance.rule
        span.set_attribute("treeserve.acceptance", rule.label)
        if ask.session_id:
            log = log.bind(session_id=ask.session_id)
        outcome = "cancelled"
        try:
            async with contextlib.aclosing(self._run(ask, span)) as events:
                async for event in events:
                    match event:
                        case Started():
                            log = log.bind(request_id=event.request_id)
                            meter.admitted(event.prompt_tokens)
                        case TokenChunk():
                            meter.tokens(len(event.token_ids), span)
                        case Finished():
                            outcome = event.reason.name.lower()
                            span.set_attribute("treeserve.output_tokens", event.completion_tokens)
                    yield event
        except Exception as error:
            outcome = "failed"
            self._parts.metrics.rejected(error)
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            log = log.bind(error=str(error) if isinstance(error, TreeserveError) else type(error).__name__)
            raise
        finally:
            meter.ended(outcome)
            span.set_attribute("treeserve.outcome", outcome)
            span.end()
            log.info("request ended", outcome=outcome, acceptance=rule.label, lossy=rule.is_lossy)

    async def _run(self, ask: Ask, span: Span) -> AsyncGenerator[GenerationEvent, None]:
        self._admission.check(ask)
        request = await self._admission.admit(ask, await self._max_context_tokens(ask.deadline))
        span.set_attribute("treeserve.request_id", request.request_id)
        record = await self._store.session(request.session_id) if request.session_id else None
        generation = Generation(request, self._parts, record.verifier_id if record else "", span)
        older = self._active.get(request.request_id)
        if older is not None:
            older.supersede()
        self._active[request.request_id] = generation
        try:
            async with contextlib.aclosing(generation.events()) as events:
                async for event in events:
                    if isinstance(event, Finished) and request.session_id:
                        committed_len = event.prompt_tokens + event.completion_tokens
                        self._store.remember_session(request.session_id, generation.verifier_id, committed_len)
                    yield event
        finally:
            if self._active.get(request.request_id) is generation:
                del self._active[request.request_id]

    async def _max_context_tokens(self, deadline: float | None) -> int:
        """The context window; waits for the first verifier, which alone knows it."""
        if self._pool.max_context_tokens == 0:
            patience = self._clock() + self._verifier_wait_s
            try:
                async with asyncio.timeout_at(patience if deadline is None else min(patience, deadline)):
                    await self._pool.wait_serving()
            except TimeoutError:
                if deadline is not None and deadline <= patience:
                    raise TimeoutError("the request's deadline passed") from None
                raise UnavailableError("no verifier is connected") from None
        return self._pool.max_context_tokens
