"""A draft desk on a clock of its own, and speculators that only record what they are told."""

from __future__ import annotations

from dataclasses import dataclass, field

from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice, Speculator

MAX_WAIT_S = 0.01
UNANSWERED = 32


@dataclass
class Outbox:
    """Records what a speculator is told."""

    assigned: dict[int, Sequence] = field(default_factory=dict)
    budgets: list[int] = field(default_factory=list)
    commits: list[CommitNotice] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        self.assigned[handle] = sequence
        self.budgets.append(budget)

    def commit(self, notice: CommitNotice) -> None:
        self.commits.append(notice)

    def release(self, handle: int) -> None:
        self.released.append(handle)


class Bench:
    """A desk on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.budget = 4
        self.prices = Prices(token_s=0.004, row=0.1)
        self.desk = DraftDesk(lambda: self.now, MAX_WAIT_S, lambda sequence: self.budget, lambda: self.prices)

    def attach(self, *sources: str, wants_top_tokens: bool = False) -> tuple[Speculator, Outbox]:
        outbox = Outbox()
        return self.desk.attach("s", sources, outbox, wants_top_tokens=wants_top_tokens), outbox

    def open(self, sequence: Sequence) -> Sequence:
        """Open a sequence and run its prefill: from its first token on, trees are asked for."""
        self.desk.open(sequence)
        self.advance(sequence, 4)
        return sequence

    def advance(self, sequence: Sequence, *tokens: int, spent: float = 0.0) -> None:
        """A step that emits these tokens; its trees are offered to it."""
        self.desk.tree(sequence)
        base = len(sequence.tokens)
        sequence.tokens.extend(tokens)
        self.desk.committed(sequence, base, tuple((t,) for t in tokens), spent)

    def waits(self, *sequences: Sequence) -> float:
        """How long a step of these sequences would wait from now on."""
        return max(0.0, self.desk.wait_until(sequences) - self.now)

    def eager(self, speculator: Speculator) -> int:
        """For how many sequences it is asked at every step."""
        seats = (seat for seats in self.desk._seats.values() for seat in seats)
        return sum(seat.eager for seat in seats if seat.speculator is speculator)


def chain(sequence: Sequence, *tokens: int) -> DraftProposal:
    """A tree of one path under the sequence's last token."""
    return DraftProposal(len(sequence.tokens), TokenTree.chain((sequence.tokens[-1], *tokens)))
