"""One generation from the client's side, without input or output: events in, chunks out, and when to resume.

The sync and async streams are thin loops around it, so both keep the same promises: offsets without gap or repeat, one
uninterrupted run of tokens however often the router had to be found again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2
from treeserve_client.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreeserveClientError,
    Unavailable,
    from_rpc,
)
from treeserve_client.types import (
    Chunk,
    Completion,
    FinishReason,
    PositionLogProbs,
    SpeculationStats,
    Started,
    Timing,
    Usage,
    acceptance_rule_from_proto,
)

_FIRST_RESUME_DELAY_S = 0.1
_MAX_RESUME_DELAY_S = 2.0
# A router has this long to come back, or another to take its address.
_RESUME_WINDOW_S = 30.0
# Thirty years: a deadline beyond what gRPC's clock can express, such as infinity, would count as passed.
_LONGEST_S = 1e9

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class CallOptions:
    """How far a call may go.

    Attributes:
        deadline_s: seconds until it must end; None for no limit.
        max_resumes: how often a broken stream is taken up again.
        routers: how many there are to try, one after the other.
        metadata: sent with every call.
    """

    deadline_s: float | None = None
    max_resumes: int = 5
    routers: int = 1
    metadata: tuple[tuple[str, str], ...] = ()


class Generation:
    """The state of one generation.

    Attributes:
        started: what the router admitted; None until it has.
        result: the completion; None until the end.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        options: CallOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.started: Started | None = None
        self.result: Completion | None = None
        self._request = request
        self._options = options
        self._clock = clock
        self._began = clock()
        self._awaits_started = True
        self._by_id = False  # any router can take it up by its id
        self._resumes = 0
        self._broke_at = 0.0
        self._attempts = 0  # since it broke
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._log_probs: list[PositionLogProbs] = []
        self._first_token_at = self._last_token_at = self._began

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """The request to send now: the original, or after an interruption the one that goes on where it broke off."""
        if self.started is None:
            return self._request
        request = inference_pb2.GenerateRequest()
        if self._by_id:
            request.resume.CopyFrom(inference_pb2.ResumeInput(offset=len(self._token_ids)))
        else:
            request.CopyFrom(self._request)
            request.sampling.seed = self.started.seed
        request.request_id = self.started.request_id
        request.model = self.started.model
        request.generated_token_ids.extend(self._token_ids)
        return request

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never negative; None without one."""
        if self._options.deadline_s is None:
            return None
        return min(max(0.0, self._began + self._options.deadline_s - self._clock()), _LONGEST_S)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return self._options.metadata

    def receive(self, event: inference_pb2.GenerateResponse) -> Chunk | None:
        """Take one event; returns the chunk it brings, if it brings tokens or text.

        Raises:
            InvalidArgument: if the router does not know the request's acceptance rule.
            Internal: if the event breaks the stream's promises, such as a gap between offsets.
        """
        kind = event.WhichOneof("event")
        if self.result is not None or (kind == "started") is not self._awaits_started:
            raise Internal(f"event {kind} out of order")
        if kind == "started":
            self._start(event.started)
        elif kind == "chunk":
            return self._append(event.chunk)
        elif kind == "finished":
            self._finish(event.finished)
        return None

    def check_ended(self) -> None:
        """The server closed the stream in good order. Raises Internal if it owed more."""
        if self.result is None:
            raise Internal("the stream ended before the generation did")

    def resume_delay_s(self, error: grpc.RpcError) -> float | None:
        """The call failed: seconds to wait before `request` may be sent again, to the next router if there are several;
        None if nothing is owed any more.

        Raises:
            TreeserveClientError: if resuming cannot help, is used up or would come after the deadline.
        """
        if self.result is not None:
            return None
        typed = from_rpc(error)
        if self._by_id and self._awaits_started and isinstance(typed, NotFound | InvalidArgument):
            self._by_id = False  # the router knows nothing of it, but it can run all of it
            return 0.0
        if not self._may_help(typed) or not self._may_try_again():
            raise typed from error
        delay_s = self._next_delay_s(typed)
        remaining_s = self.remaining_s
        if remaining_s is not None and remaining_s <= delay_s:
            raise DeadlineExceeded("the deadline leaves no time to resume") from error
        return delay_s

    def _may_help(self, error: TreeserveClientError) -> bool:
        """Whether another try can go better. One that is being resumed waits for a place where there is none."""
        resumes = self.started is not None and self._awaits_started
        is_full = isinstance(error, ResourceExhausted) and error.retry_after_s is not None
        return isinstance(error, Unavailable) or (is_full and resumes)

    def _next_delay_s(self, error: TreeserveClientError) -> float:
        """Each router is tried at once; then there is a pause, twice as long every time."""
        self._attempts += 1
        if isinstance(error, ResourceExhausted):
            return error.retry_after_s or 0.0
        if self._attempts % self._options.routers:
            return 0.0
        rounds = self._attempts // self._options.routers
        return min(_FIRST_RESUME_DELAY_S * 2.0 ** (rounds - 1), _MAX_RESUME_DELAY_S)

    def _may_try_again(self) -> bool:
        """Whether to try (again) after a running stream broke, or an attempt to start or resume it failed."""
        if self.started is None:
            return self._attempts + 1 < self._options.routers
        if self._awaits_started:
            return self._clock() - self._broke_at < _RESUME_WINDOW_S
        self._awaits_started = True
        self._broke_at = self._clock()
        self._attempts = 0
        self._resumes += 1
        return self._resumes <= self._options.max_resumes

    def _start(self, msg: inference_pb2.Started) -> None:
        acceptance = acceptance_rule_from_proto(msg.acceptance)
        asked = acceptance_rule_from_proto(self._request.speculation.acceptance)
        if acceptance != asked:  # it ignored a field that it does not know
            raise InvalidArgument.of("speculation.acceptance", f"the router does not know {asked!r}")
        started = Started(msg.request_id, msg.model, msg.seed, msg.prompt_tokens, acceptance)
        if self.started not in (None, started):
            raise Internal(f"resumed as another generation: {started} instead of {self.started}")
        self.started = started
        self._by_id = msg.resumable
        self._awaits_started = False

    def _append(self, msg: inference_pb2.TokenChunk) -> Chunk | None:
        if msg.offset != len(self._token_ids):
            raise Internal(f"token offset {msg.offset} where {len(self._token_ids)} was due")
        chunk = Chunk.from_proto(msg)
        self._token_ids += chunk.token_ids
        self._texts.append(chunk.text)
        self._log_probs += chunk.log_probs
        if chunk.token_ids:
            self._last_token_at = self._clock()
            if chunk.offset == 0:
                self._first_token_at = self._last_token_at
        return chunk if chunk.token_ids or chunk.text else None

    def _finish(self, msg: inference_pb2.Finished) -> None:
        if msg.reason not in _FINISH_REASONS:
            raise Internal(f"unknown finish reason {msg.reason}")
        self.result = Completion(
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            log_probs=tuple(self._log_probs),
            finish_reason=_FINISH_REASONS[msg.reason],
            stop_string=msg.stop_string or None,
            usage=Usage(msg.usage.prompt_tokens, msg.usage.completion_tokens, msg.usage.cached_tokens),
            speculation=SpeculationStats.from_proto(msg.speculation),
            timing=self._timing(),
            request_id=self.started.request_id if self.started is not None else "",
        )

    def _timing(self) -> Timing:
        after_first = max(1, len(self._token_ids) - 1)
        return Timing(
            ttft_ms=(self._first_token_at - self._began) * 1e3,
            tpot_ms=(self._last_token_at - self._first_token_at) / after_first * 1e3,
            e2e_ms=(self._clock() - self._began) * 1e3,
        )
