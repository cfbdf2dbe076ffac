"""The life of one request: from the queue over one or more verifiers to exactly one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from opentelemetry.trace import Span

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import OverloadedError, UnavailableError
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_router.admission import RouterRequest
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.mailbox import Ended, Lost, Mailbox, Placed, SequenceEvent, Stranded, Superseded, Tokens
from treeserve_router.metrics import RouterMetrics
from treeserve_router.queue import Ticket
from treeserve_router.visible_output import TokenChunk, VisibleOutput
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.telemetry import traceparent_of

# A slow client's tokens gather into chunks; with all log-probabilities this many stay far below 1 MiB.
_MAX_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Started:
    """The request was admitted. Its tokens are accepted by the rule `acceptance`."""

    request_id: str
    seed: int
    prompt_tokens: int
    acceptance: AcceptanceRule


@dataclass(frozen=True)
class Finished:
    """The generation ended. `completion_tokens` counts what the client has, tokens of a resumed request included."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stats: SpeculationStats
    stop_string: str = ""


GenerationEvent = Started | TokenChunk | Finished


@dataclass(frozen=True)
class GenerationParts:
    """What every generation of a router works with.

    Attributes:
        max_replays: failures in a row without a new token that end a request.
    """

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    metrics: RouterMetrics
    max_replays: int


class Generation:
    """One admitted request.

    Its output is whatever tokens verifiers committed, in order. When the one that runs it is lost, the request goes
    back to the queue with that output: sampling has no other state, so the next verifier continues as well (under
    acceptance by replay with the very same tokens).

    Args:
        preferred_verifier: id of the verifier its session used last; empty for none.
        span: the request's span.
    """

    def __init__(self, request: RouterRequest, parts: GenerationParts, preferred_verifier: str, span: Span) -> None:
        self._request = request
        self._parts = parts
        self._preferred_verifier = preferred_verifier
        self._span = span
        self._mailbox = Mailbox()
        self._output = list(request.generated_token_ids)
        self._visible = VisibleOutput(parts.tokenizer, request.stopping.stop_strings, request.generated_token_ids)
        self._stats = SpeculationStats(acceptance=request.limits.acceptance.rule)
        self._ticket: Ticket | None = None
        self._failures = 0
        self.verifier_id = ""  # the verifier that ran it last

    def supersede(self) -> None:
        """End it as cancelled: a newer call with its id took over."""
        self._mailbox.put(Superseded())

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Run it: one Started, chunks without gap or repeat, one Finished. Closing the generator cancels it.

        Raises:
            OverloadedError: before Started, if the queue is full.
            UnavailableError: if no verifier can serve it, or too many failed in a row.
            TimeoutError: when the request's deadline passes.
            TreeserveError: whatever else the verifier answered.
        """
        reason = self._reason_to_end()
        if reason is None:
            self._submit()
        try:
            yield self._started()
            while reason is None:
                tokens, outcome = self._absorb(await self._next_events())
                for chunk in self._show(tokens):
                    yield chunk
                reason = self._settle(outcome)
                if self._visible.stopped is not None:
                    reason = FinishReason.STOP
            if (rest := self._visible.flush()) is not None:
                yield rest
            yield self._finished(reason)
        finally:
            self._withdraw()

    def _started(self) -> Started:
        request = self._request
        return Started(
            request.request_id, request.sampling.seed, len(request.prompt_token_ids), request.limits.acceptance.rule
        )

    def _submit(self, *, is_replay: bool = False) -> None:
        self._ticket = Ticket(
            request=self._request,
            generated_token_ids=tuple(self._output),
            mailbox=self._mailbox,
            preferred_verifier=self._preferred_verifier,
            traceparent=traceparent_of(self._span),
            is_replay=is_replay,
        )
        self._parts.dispatcher.submit(self._ticket)

    def _withdraw(self) -> None:
        if self._ticket is not None:
            self._parts.dispatcher.withdraw(self._ticket)
            self._ticket = None

    async def _next_events(self) -> list[SequenceEvent]:
        try:
            async with asyncio.timeout_at(self._request.deadline):
                return await self._mailbox.take()
        except TimeoutError:
            raise TimeoutError("the request's deadline passed") from None

    def _absorb(self, events: list[SequenceEvent]) -> tuple[Tokens, SequenceEvent | None]:
        """All new tokens as one run, and what happened to the sequence after them, if anything."""
        start = len(self._output)
        log_probs: list[PositionLogProbs] = []
        outcome: SequenceEvent | None = None
        for event in events:
            match event:
                case Placed(verifier_id):
                    self.verifier_id = verifier_id
                    self._span.add_event("placed", {"verifier_id": verifier_id, "offset": len(self._output)})
                case Tokens() if not self._continues(event):
                    outcome = Lost(self.verifier_id, "it sent tokens that do not continue the output")
                    break
                case Tokens():
                    self._output.extend(event.token_ids)
                    log_probs.extend(event.log_probs)
                    self._failures = 0
                case _:
                    outcome = event
        return Tokens(start, tuple(self._output[start:]), tuple(log_probs)), outcome

    def _continues(self, tokens: Tokens) -> bool:
        """Whether a verifier's tokens are the next ones and complete; a peer is not trusted with that."""
        wants_log_probs = self._request.sampling.top_log_probs is not None
        return (
            tokens.offset == len(self._output)
            and tokens.offset + len(tokens.token_ids) <= self._request.stopping.max_tokens
            and max(tokens.token_ids) < self._parts.tokenizer.vocab_size
            and len(tokens.log_probs) == (len(tokens.token_ids) if wants_log_probs else 0)
        )

    def _show(self, tokens: Tokens) -> Iterator[TokenChunk]:
        """The chunks that new tokens make certain."""
        for i in range(0, len(tokens.token_ids), _MAX_CHUNK_TOKENS):
            piece = slice(i, i + _MAX_CHUNK_TOKENS)
            chunk = self._visible.push(tokens.token_ids[piece], tokens.log_probs[piece])
            if chunk is not None:
                yield chunk

    def _settle(self, outcome: SequenceEvent | None) -> FinishReason | None:
        """Why the generation ends with this outcome; None if it goes on. Raises the error that ends it."""
        match outcome:
            case Superseded():
                return FinishReason.CANCELLED
            case Stranded():
                raise UnavailableError("no verifier can take the request")
            case Ended(reason, stats, error):
                if stats is not None:
                    self._stats.add(stats)  # after a replay the request has the sum
                if isinstance(error, UnavailableError | OverloadedError):
                    return self._replay(error)
                if error is not None:
                    raise error
                return reason
            case Lost(verifier_id, why):
                return self._replay(UnavailableError(f"verifier {verifier_id}: {why}"))
            case _:
                return None

    def _replay(self, error: UnavailableError | OverloadedError) -> FinishReason | None:
        """Queue it again with its output so far, unless that is complete already."""
        self._withdraw()
        reason = self._reason_to_end()
        if reason is not None:
            return reason
        self._failures += 1
        if self._failures > self._parts.max_replays:
            raise error
        self._parts.metrics.replays.inc()
        self._span.add_event("replay", {"reason": str(error), "offset": len(self._output)})
        self._submit(is_replay=True)
        return None

    def _reason_to_end(self) -> FinishReason | None:
        """Why the output is complete, if it is: a lost verifier or an old stream may not have got to say so."""
        stopping = self._request.stopping
        if self._visible.stopped is not None:
            return FinishReason.STOP
        if self._output:
            ignored = () if stopping.ignore_eos else self._parts.tokenizer.eos_token_ids
            if self._output[-1] in (*stopping.stop_token_ids, *ignored):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self._output) >= stopping.max_tokens else None

    def _finished(self, reason: FinishReason) -> Finished:
        return Finished(
            reason=reason,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._visible.num_tokens,
            stats=self._stats,
            stop_string=self._visible.stopped or "",
        )
