"""The life of one request: from the queue over one or more verifiers to exactly one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import HandedBackError, OverloadedError, UnavailableError
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_router.admission import RouterRequest
from treeserve_router.affinity import Affinity
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.explain import NO_DECISIONS, DecisionKind, DecisionLog
from treeserve_router.hedging import Hedger
from treeserve_router.mailbox import (
    Ended,
    Interrupted,
    Lost,
    Mailbox,
    Placed,
    SequenceEvent,
    Shed,
    Stranded,
    Superseded,
    Tokens,
)
from treeserve_router.metrics import RouterMetrics
from treeserve_router.queue import Ticket
from treeserve_router.runs import Runs
from treeserve_router.visible_output import TokenChunk, VisibleOutput
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.telemetry import traceparent_of

# A slow client's tokens gather into chunks; with all log-probabilities this many stay far below 1 MiB.
_MAX_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Started:
    """The request was admitted. Its tokens are accepted by the rule `acceptance`; `resumable` by its id alone."""

    request_id: str
    seed: int
    prompt_tokens: int
    acceptance: AcceptanceRule
    resumable: bool = False


@dataclass(frozen=True)
class Finished:
    """The generation ended. `completion_tokens` counts what the client has, tokens of a resumed request included.

    Of the prompt, `cached_tokens` did not have to be computed by the verifier that it ended on.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stats: SpeculationStats
    stop_string: str = ""
    cached_tokens: int = 0


GenerationEvent = Started | TokenChunk | Finished


@dataclass(frozen=True)
class GenerationParts:
    """What every generation of a router works with.

    Attributes:
        max_replays: failures in a row without a new token that end a request.
        decisions: where what happens to them is noted.
        charge: told of tokens that were generated for a request.
    """

    dispatcher: Dispatcher
    hedger: Hedger
    tokenizer: Tokenizer
    metrics: RouterMetrics
    max_replays: int
    decisions: DecisionLog = NO_DECISIONS
    charge: Callable[[RouterRequest, int], None] = lambda request, num_tokens: None


class Generation:
    """One admitted request.

    Its output is whatever tokens verifiers committed, in order. When the one that runs it is lost, the request goes
    back to the queue with that output: sampling has no other state, so the next verifier continues as well (under
    acceptance by replay with the very same tokens).

    Args:
        affinity: what speaks for some verifiers.
        span: the request's span.
    """

    def __init__(self, request: RouterRequest, parts: GenerationParts, affinity: Affinity, span: Span) -> None:
        self._request = request
        self._parts = parts
        self._affinity = affinity
        self._span = span
        self._runs = Runs(parts.dispatcher, parts.hedger, self._ticket)
        self._output = list(request.generated_token_ids)
        known, delivered = request.generated_token_ids, request.num_delivered
        self._visible = VisibleOutput(
            parts.tokenizer, request.stopping.stop_strings, known[:delivered], num_delivered=delivered
        )
        self._undelivered = list(self._show(Tokens(delivered, known[delivered:])))
        self._stats = SpeculationStats(acceptance=request.limits.acceptance.rule)
        self._cached_tokens = 0
        self._failures = 0
        self._handed_back_by: set[str] = set()

    @property
    def verifier_id(self) -> str:
        """The verifier that runs it, or ran it last."""
        return self._runs.verifier_id

    @property
    def output(self) -> Sequence[int]:
        """The output tokens so far, shown or not. It grows as the generation runs."""
        return self._output

    def supersede(self) -> None:
        """End it as cancelled: a newer call with its id took over."""
        self._runs.order(Superseded())

    def interrupt(self, why: str) -> None:
        """End it with UNAVAILABLE: its client can resume it at another router."""
        self._runs.order(Interrupted(why))

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Run it: one Started, chunks without gap or repeat, one Finished. Closing the generator cancels it.

        Raises:
            OverloadedError: before Started, if the queue is full.
            UnavailableError: if no verifier can serve it, too many failed in a row, or it is interrupted.
            TimeoutError: when the request's deadline passes.
            TreeserveError: whatever else the verifier answered.
        """
        ended = "cancelled"
        reason = self._reason_to_end()
        if reason is None:
            self._runs.submit(is_replay=self._request.is_taken_up)
        try:
            yield self._started()
            for chunk in self._undelivered:
                yield chunk
            while reason is None:
                tokens, outcome = self._absorb(await self._next_events())
                for chunk in self._show(tokens):
                    yield chunk
                reason = self._settle(outcome)
                if self._visible.stopped is not None:
                    reason = FinishReason.STOP
            if (rest := self._visible.flush()) is not None:
                yield rest
            ended = reason.name.lower()
            yield self._finished(reason)
        except Exception as error:
            ended = str(error)
            raise
        finally:
            self._parts.decisions.note(self._request, DecisionKind.ENDED, ended, self.verifier_id)
            self._runs.withdraw()

    def _started(self) -> Started:
        request = self._request
        return Started(
            request.request_id, request.sampling.seed, len(request.prompt_token_ids), request.limits.acceptance.rule
        )

    def _ticket(self, mailbox: Mailbox, is_replay: bool) -> Ticket:
        ran_before = bool(self.verifier_id)
        return Ticket(
            request=self._request,
            generated_token_ids=tuple(self._output),
            mailbox=mailbox,
            preferred_verifier=self._affinity.preferred_verifier,
            # A newer turn fences off old ones that have not begun, but ends no stream that runs.
            session_epoch=0 if ran_before else self._affinity.session_epoch,
            prefix_tokens=self._affinity.prefix_tokens,
            traceparent=traceparent_of(self._span),
            is_replay=is_replay,
        )

    async def _next_events(self) -> list[SequenceEvent]:
        try:
            async with asyncio.timeout_at(self._request.deadline):
                return await self._runs.next()
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
                    self._span.add_event("placed", {"verifier_id": verifier_id, "offset": len(self._output)})
                case Tokens() if not self._continues(event):
                    outcome = Lost(self.verifier_id, "it sent tokens that do not continue the output")
                    break
                case Tokens():
                    self._output.extend(event.token_ids)
                    self._parts.charge(self._request, len(event.token_ids))
                    log_probs.extend(event.log_probs)
                    self._failures = 0
                case _:
                    outcome = event
        if start == len(self._request.generated_token_ids) < len(self._output):
            self._parts.decisions.note(self._request, DecisionKind.FIRST_TOKEN, verifier_id=self.verifier_id)
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
            case Interrupted(why):
                raise UnavailableError(why)
            case Shed(error):
                raise error
            case Stranded():
                raise UnavailableError("no verifier can take the request")
            case Ended(reason, stats, error, cached_tokens):
                self._cached_tokens = min(cached_tokens, len(self._request.prompt_token_ids))
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
        self._runs.withdraw()
        reason = self._reason_to_end()
        if reason is not None:
            return reason
        if not self._is_hand_back(error):
            self._failures += 1
        if self._failures > self._parts.max_replays:
            raise error
        self._parts.metrics.replays.inc()
        self._parts.decisions.note(self._request, DecisionKind.REPLAYED, str(error))
        self._span.add_event("replay", {"reason": str(error), "offset": len(self._output)})
        self._runs.submit(is_replay=True)
        return None

    def _is_hand_back(self, error: Exception) -> bool:
        """Whether nothing failed: a verifier that is about to go gave it back, and has not done so before."""
        if not isinstance(error, HandedBackError) or self.verifier_id in self._handed_back_by:
            return False
        self._handed_back_by.add(self.verifier_id)
        return True

    def _reason_to_end(self) -> FinishReason | None:
        """Why the output is complete, if it is: a lost verifier or an old stream may not have got to say so."""
        stopping = self._request.stopping
        if self._visible.stopped is not None:
            return FinishReason.STOP
        if self._output:
            eos_ids = () if stopping.ignore_eos else self._parts.tokenizer.eos_token_ids
            if self._output[-1] in (*stopping.stop_token_ids, *eos_ids):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self._output) >= stopping.max_tokens else None

    def _finished(self, reason: FinishReason) -> Finished:
        return Finished(
            reason=reason,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._visible.num_tokens,
            stats=self._stats,
            stop_string=self._visible.stopped or "",
            cached_tokens=self._cached_tokens,
        )
