"""What a sequence was promised: when its next token is due, and whether the targets were met."""

from __future__ import annotations

from dataclasses import dataclass

# Of the time per output token, what may be used up here: the way to the client takes some, and so does bad luck.
TPOT_SHARE = 0.9


@dataclass(eq=False)
class Promise:
    """A sequence's targets, and how it keeps them. Times are clock seconds.

    Attributes:
        ttft_ms, tpot_ms: targets; None for no target.
        asked_at: when the request arrived, wherever that was.
        first_at, last_at: when the first and the last tokens so far were emitted here; None before.
        later_tokens: tokens emitted after the first.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    asked_at: float = 0.0
    first_at: float | None = None
    last_at: float | None = None
    later_tokens: int = 0

    def emitted(self, count: int, now: float) -> None:
        """Tokens left."""
        if self.first_at is None:
            self.first_at = now
            count -= 1
        self.later_tokens += count
        self.last_at = now

    @property
    def due_at(self) -> float | None:
        """When the next token should come; None if that was not promised."""
        if self.first_at is None:
            return None if self.ttft_ms is None else self.asked_at + self.ttft_ms / 1e3
        if self.tpot_ms is None:
            return None
        return self.first_at + TPOT_SHARE * self.tpot_ms / 1e3 * (self.later_tokens + 1)

    def reserve_ms(self, tokens_left: int) -> float:
        """By how much the last of `tokens_left` tokens may come later than `due_at` has it, and meet the target."""
        return 0.0 if self.tpot_ms is None else (1.0 - TPOT_SHARE) * self.tpot_ms * (self.later_tokens + tokens_left)

    @property
    def met_ttft(self) -> bool | None:
        """Whether the first token came in time; None without a target or a token."""
        if self.ttft_ms is None or self.first_at is None:
            return None
        return self.first_at - self.asked_at <= self.ttft_ms / 1e3

    @property
    def met_tpot(self) -> bool | None:
        """Whether the tokens after the first came fast enough on average; None without a target or such tokens."""
        if self.tpot_ms is None or self.first_at is None or self.last_at is None or self.later_tokens == 0:
            return None
        return self.last_at - self.first_at <= self.later_tokens * self.tpot_ms / 1e3
