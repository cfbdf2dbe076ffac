"""The client's side of one simulated request: what has come so far, and when."""

from __future__ import annotations

from collections.abc import Callable

from treeserve_core.errors import OverloadedError, TreeserveError, UnavailableError
from treeserve_core.outcome import SpeculationStats
from treeserve_router.mailbox import Ended, Lost, Mailbox, Placed, SequenceEvent, Shed, Stranded, Tokens
from treeserve_simulator.record import Outcome, Record
from treeserve_simulator.trace import TraceRequest


class Answer:
    """Output of a request over all its tries.

    Args:
        sent_s: when it was sent.
        reply_s: from the router to the client.
        clock: seconds.
        charge: told of tokens that were generated.

    Attributes:
        is_over: its end has come.
        verifier_id: the verifier that ran it last.
    """

    def __init__(
        self,
        request: TraceRequest,
        sent_s: float,
        reply_s: float,
        clock: Callable[[], float],
        charge: Callable[[int], None],
    ) -> None:
        self._request = request
        self._sent_s = sent_s
        self._reply_s = reply_s
        self._clock = clock
        self._charge = charge
        self._first_token_s: float | None = None
        self._stats = SpeculationStats()
        self._cached_tokens = 0
        self._replays = 0
        self._failures = 0
        self.token_ids: list[int] = []
        self.verifier_id = ""
        self.is_over = False

    async def follow(self, mailbox: Mailbox, max_replays: int) -> None:
        """Take what comes of a try, until the request is over or has to be tried again.

        Raises:
            UnavailableError, OverloadedError: if it failed more than `max_replays` times without a new token, or may
                wait no longer for a verifier.
            TreeserveError: whatever else a verifier answered.
        """
        while not self.is_over:
            for event in await mailbox.take():
                error = self._take(event)
                if error is not None:
                    self._failures += 1
                    if self._failures > max_replays:
                        raise error
                    self._replays += 1
                    return

    def record(self, outcome: Outcome) -> Record:
        """What became of it, as of now."""
        return Record(
            self._request,
            outcome,
            self._sent_s,
            self._clock() + self._reply_s,
            self._first_token_s,
            len(self.token_ids),
            self.verifier_id,
            self._cached_tokens,
            self._stats.steps,
            self._stats.accepted,
            self._replays,
        )

    def _take(self, event: SequenceEvent) -> TreeserveError | None:
        """Follow an event; the error for which the request must be tried again."""
        match event:
            case Placed(verifier_id):
                self.verifier_id = verifier_id
            case Tokens(offset, token_ids):
                if offset != len(self.token_ids):
                    raise RuntimeError(f"tokens at {offset} do not continue an output of {len(self.token_ids)}")
                if self._first_token_s is None:
                    self._first_token_s = self._clock() + self._reply_s
                self.token_ids += token_ids
                self._charge(len(token_ids))
                self._failures = 0
            case Ended(error=None):
                self._count(event)
                self.is_over = True
            case Ended(error=(UnavailableError() | OverloadedError()) as error):
                self._count(event)
                return error
            case Ended(error=Exception() as error):
                raise error
            case Lost(verifier_id, why):
                return UnavailableError(f"verifier {verifier_id}: {why}")
            case Shed(error):
                raise error
            case Stranded():
                raise UnavailableError("no verifier can take the request")
            case _:
                pass
        return None

    def _count(self, ended: Ended) -> None:
        self._cached_tokens = ended.cached_tokens
        if ended.stats is not None:
            self._stats.add(ended.stats)
