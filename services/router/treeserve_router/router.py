"""What both edges call: generate text for an ask, and say which model is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import structlog
from opentelemetry.trace import Span, Status, StatusCode, Tracer, format_trace_id

from treeserve_core.errors import NotFoundError, TreeserveError, UnavailableError
from treeserve_router.admission import Admission, Ask, RouterRequest, label_of
from treeserve_router.affinity import AffinityBook
from treeserve_router.generation import Finished, Generation, GenerationEvent, GenerationParts, Started
from treeserve_router.journal import Journal
from treeserve_router.metrics import RequestMeter
from treeserve_router.pool import ServedModel, VerifierPool
from treeserve_router.quotas import Quotas
from treeserve_router.resume import take_up
from treeserve_router.visible_output import TokenChunk
from treeserve_wire.telemetry import context_from

_log = structlog.get_logger(__name__)


class Router:
    """Admits requests and runs them.

    Args:
        parts: what generations work with.
        book: where requests' KV may be.
        journal: what other routers need to take up the requests of this one, and this one theirs.
        quotas: of tenants.
        verifier_wait_s: longest time a request waits for the first verifier's limits.
        clock: seconds, monotonic; the event loop's own.
    """

    def __init__(
        self,
        admission: Admission,
        pool: VerifierPool,
        parts: GenerationParts,
        book: AffinityBook,
        journal: Journal,
        quotas: Quotas,
        tracer: Tracer,
        *,
        verifier_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._pool = pool
        self._parts = parts
        self._book = book
        self._journal = journal
        self._quotas = quotas
        self._tracer = tracer
        self._verifier_wait_s = verifier_wait_s
        self._clock = clock
        self._active: dict[tuple[str, str], Generation] = {}  # by tenant and request id
        self._interrupted = ""  # why nothing runs here any more

    @property
    def is_ready(self) -> bool:
        """Whether at least one verifier can take work."""
        return self._pool.is_serving

    def interrupt(self, why: str) -> None:
        """End what runs, and whatever comes, with UNAVAILABLE: clients can resume it at another router."""
        self._interrupted = why
        for generation in self._active.values():
            generation.interrupt(why)

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

        A newer ask of a tenant with the same request id takes over: its client came back before this side saw the old
        stream break, and the older generation ends as cancelled.

        Raises:
            TreeserveError: if it is refused or fails.
            TimeoutError: when its deadline passes.
        """
        meter = RequestMeter(self._parts.metrics, ask.limits, self._clock)
        span = self._tracer.start_span("treeserve.generate", context=context_from(ask.traceparent))
        log = _log.bind(trace_id=format_trace_id(span.get_span_context().trace_id))
        rule = ask.limits.acceptance.rule
        if ask.session_id:
            log = log.bind(session_id=ask.session_id)
        outcome = "cancelled"
        try:
            async with contextlib.aclosing(self._run(ask, span, meter)) as events:
                async for event in events:
                    match event:
                        case Started():
                            log = log.bind(request_id=event.request_id)
                            rule = event.acceptance
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

    async def _run(self, ask: Ask, span: Span, meter: RequestMeter) -> AsyncGenerator[GenerationEvent, None]:
        self._admission.check(ask)
        request = await self._request(ask)
        meter.resolved(request.limits)
        span.set_attribute("treeserve.request_id", request.request_id)
        span.set_attribute("treeserve.acceptance", request.limits.acceptance.rule.label)
        prompt_tokens = len(request.prompt_token_ids)
        async with (
            self._quotas.admitted(request.tenant, prompt_tokens, is_resumed=request.is_taken_up),
            contextlib.aclosing(self._generate(request, span)) as events,
        ):
            async for event in events:
                yield event

    async def _generate(self, request: RouterRequest, span: Span) -> AsyncGenerator[GenerationEvent, None]:
        await self._admission.check_grammar(request)
        affinity = await self._book.find(request)
        generation = Generation(request, self._parts, affinity, span)
        key = (request.tenant, request.request_id)
        older = self._active.get(key)
        if older is not None:
            older.supersede()
        self._active[key] = generation
        if self._interrupted:
            generation.interrupt(self._interrupted)
        try:
            with await self._journal.open(request, generation.output) as page:
                async with contextlib.aclosing(generation.events()) as events:
                    async for event in events:
                        yield replace(event, resumable=page.is_kept) if isinstance(event, Started) else event
        finally:
            self._book.note(request, affinity, generation.verifier_id, generation.output)
            if self._active.get(key) is generation:
                del self._active[key]

    async def _request(self, ask: Ask) -> RouterRequest:
        """The request of a checked ask: a new one, or one that runs already."""
        if ask.resume_offset is not None:
            return take_up(ask, await self._journal.find(label_of(ask), ask.request_id))
        return await self._admission.admit(ask, await self._max_context_tokens(ask.deadline))

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
