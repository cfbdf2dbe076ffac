"""The verifier's side of drafting: which speculator drafts for which sequence, and the trees that came back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree, merge
from treeserve_verifier.sequence import Sequence

_LATENCY_SMOOTHING = 0.2
_MISSES_BEFORE_IGNORED = 3
_ASKS_REMEMBERED = 8


@dataclass(frozen=True)
class CommitNotice:
    """Tokens committed for a sequence, as a speculator is told.

    Attributes:
        base_committed_len: committed length before them.
        budget: nodes the next tree may have.
        top_token_ids: for each committed token what the target held most probable in its place; empty if not wanted.
    """

    handle: int
    base_committed_len: int
    token_ids: tuple[int, ...]
    budget: int
    top_token_ids: tuple[tuple[int, ...], ...] = ()


class DraftOutbox(Protocol):
    """Where a speculator's messages gather until its stream sends them. None of these may block."""

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        """A new sequence to draft for."""

    def commit(self, notice: CommitNotice) -> None:
        """Progress of an assigned sequence."""

    def release(self, handle: int) -> None:
        """The sequence is no longer this speculator's."""


@dataclass(eq=False)
class Speculator:
    """An attached speculator.

    Attributes:
        sources: names of its draft sources, in the order of its source mask bits.
        source_bits: for each of them its bit among all sources this verifier has met.
        latency_s: smoothed time from a commit to its tree, however late; 0 before the first.
        heard_at: clock time of its last tree.
        misses: steps in a row it let wait in vain.
        missed_at: clock time of the last of them.
    """

    name: str
    sources: tuple[str, ...]
    source_bits: tuple[int, ...]
    outbox: DraftOutbox
    wants_top_tokens: bool = False
    next_handle: int = 1
    sequences: dict[int, Sequence] = field(default_factory=dict)
    latency_s: float = 0.0
    heard_at: float = 0.0
    misses: int = 0
    missed_at: float = 0.0

    @property
    def responsive(self) -> bool:
        """Whether waiting for its trees is worth it at present."""
        return self.misses < _MISSES_BEFORE_IGNORED


@dataclass(eq=False)
class _Seat:
    """A sequence at one speculator.

    Attributes:
        asked: whether a tree was asked for at `asked_at`: a budget of 0 asks for none.
        asked_for: committed lengths for which trees were asked and did not come, and when; the last few.
        proposal: the newest tree that came and is not used yet.
        answered_len: base of the newest tree taken.
    """

    speculator: Speculator
    handle: int
    asked_at: float = 0.0
    asked: bool = False
    asked_for: dict[int, float] = field(default_factory=dict)
    proposal: DraftProposal | None = None
    answered_len: int = 0

    def ask(self, committed_len: int, now: float, budget: int) -> None:
        """The speculator is told how far the sequence is and how many nodes may follow."""
        self.asked_at, self.asked = now, budget > 0
        if self.asked:
            self.asked_for[committed_len] = now
            if len(self.asked_for) > _ASKS_REMEMBERED:
                del self.asked_for[next(iter(self.asked_for))]


class DraftDesk:
    """Assigns sequences to speculators and keeps their newest trees. Owns all seats; runs on the event loop only.

    Speculators with the same sources share the sequences between them; those with different sources draft side by
    side, and their trees are merged.
    """

    def __init__(self, clock: Callable[[], float], max_wait_s: float, budget_of: Callable[[Sequence], int]) -> None:
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._budget_of = budget_of  # nodes the next tree of a sequence may have
        self._speculators: list[Speculator] = []
        self._seats: dict[Sequence, list[_Seat]] = {}
        self._source_names: list[str] = []
        self.late = 0

    @property
    def speculators(self) -> tuple[Speculator, ...]:
        """Attached speculators."""
        return tuple(self._speculators)

    def source_names(self, mask: int) -> list[str]:
        """Names of the sources in a merged tree's mask."""
        return [name for bit, name in enumerate(self._source_names) if mask >> bit & 1]

    def attach(self, name: str, sources: tuple[str, ...], outbox: DraftOutbox, *, wants_top_tokens: bool) -> Speculator:
        """Add a speculator and give it its share of the sequences that are open."""
        for source in sources:
            if source not in self._source_names:
                self._source_names.append(source)
        bits = tuple(self._source_names.index(source) for source in sources)
        speculator = Speculator(name, sources, bits, outbox, wants_top_tokens)
        self._speculators.append(speculator)
        for sequence, seats in self._seats.items():
            if all(seat.speculator.sources != sources for seat in seats):
                self._seat(sequence, speculator)
        return speculator

    def detach(self, speculator: Speculator) -> None:
        """Remove a speculator; its sequences go to another with the same sources if there is one."""
        self._speculators.remove(speculator)
        for sequence in speculator.sequences.values():
            seats = self._seats[sequence]
            seats[:] = [seat for seat in seats if seat.speculator is not speculator]
            heir = self._least_loaded(speculator.sources)
            if heir is not None:
                self._seat(sequence, heir)

    def open(self, sequence: Sequence) -> None:
        """Have the sequence drafted for, unless it is already or its request forbids speculation."""
        if sequence in self._seats or not sequence.submission.limits.speculates:
            return
        self._seats[sequence] = []
        for sources in {speculator.sources for speculator in self._speculators}:
            speculator = self._least_loaded(sources)
            assert speculator is not None  # the sources are those of an attached one
            self._seat(sequence, speculator)

    def close(self, sequence: Sequence) -> None:
        """The sequence ended: release it everywhere."""
        for seat in self._seats.pop(sequence, ()):
            del seat.speculator.sequences[seat.handle]
            seat.speculator.outbox.release(seat.handle)

    def wants_top_tokens(self, sequence: Sequence) -> bool:
        """Whether a speculator of the sequence asked for the target's most probable tokens."""
        return any(seat.speculator.wants_top_tokens for seat in self._seats.get(sequence, ()))

    def committed(self, sequence: Sequence, base_len: int, top_token_ids: tuple[tuple[int, ...], ...]) -> None:
        """Tell the sequence's speculators what was committed after `base_len`, and start waiting for their trees."""
        now, budget = self._clock(), self._budget_of(sequence)
        for seat in self._seats.get(sequence, ()):
            if seat.asked and seat.answered_len < base_len:
                self._count_miss(seat, now)
            seat.ask(len(sequence.tokens), now, budget)
            notice = CommitNotice(
                seat.handle,
                base_len,
                tuple(sequence.tokens[base_len:]),
                budget,
                top_token_ids if seat.speculator.wants_top_tokens else (),
            )
            seat.speculator.outbox.commit(notice)

    def propose(self, speculator: Speculator, handle: int, proposal: DraftProposal) -> Sequence | None:
        """Take a tree. Returns its sequence, or None if that ended in the meantime.

        Raises:
            NotFoundError: the handle was never assigned.
            StaleBaseError: the tree does not fit the committed tokens any more (it is late) or never did.
        """
        sequence = speculator.sequences.get(handle)
        if sequence is None:
            if handle >= speculator.next_handle or handle < 1:
                raise NotFoundError(f"handle {handle} was never assigned on this stream")
            return None
        seat = next(s for s in self._seats[sequence] if s.speculator is speculator)
        self._learn_latency(seat, proposal.base_committed_len)
        try:
            proposal.rebased(sequence.tokens)
        except StaleBaseError:
            self.late += 1
            raise
        if proposal.base_committed_len < seat.answered_len:
            return sequence  # reordered: a newer tree is here already
        seat.proposal = proposal
        seat.answered_len = proposal.base_committed_len
        return sequence

    def tree(self, sequence: Sequence) -> TokenTree | None:
        """The merged tree under the sequence's present root; None if no speculator has one."""
        trees: list[TokenTree] = []
        for seat in self._seats.get(sequence, ()):
            if seat.proposal is None:
                continue
            try:
                trees.append(self._with_global_sources(seat.speculator, seat.proposal.rebased(sequence.tokens)))
            except StaleBaseError:
                self.late += 1
                seat.proposal = None
        return merge(trees) if trees else None

    def wait_until(self, sequence: Sequence) -> float:
        """Clock time until which the sequence's next step should wait for trees; in the past if it is ready."""
        deadlines = [
            self._wait_until(seat)
            for seat in self._seats.get(sequence, ())
            if seat.asked and seat.answered_len < len(sequence.tokens) and seat.speculator.responsive
        ]
        return max(deadlines, default=0.0)

    def _wait_until(self, seat: _Seat) -> float:
        """Clock time until which the seat's tree is worth waiting for: a while longer than it usually takes."""
        latency_s = seat.speculator.latency_s
        return seat.asked_at + (min(self._max_wait_s, 2.0 * latency_s + 0.002) if latency_s else self._max_wait_s)

    def _learn_latency(self, seat: _Seat, answered_len: int) -> None:
        """A tree arrived. A late one counts too: else only those within the present wait would ever be seen."""
        now, speculator = self._clock(), seat.speculator
        speculator.heard_at = now
        asked_at = seat.asked_for.pop(answered_len, None)
        if asked_at is None:
            return
        latency_s = now - asked_at
        weight = _LATENCY_SMOOTHING if speculator.latency_s else 1.0
        speculator.latency_s += weight * (latency_s - speculator.latency_s)
        if latency_s <= self._max_wait_s:
            speculator.misses = 0

    def _count_miss(self, seat: _Seat, now: float) -> None:
        """A step ran without the seat's tree: a miss if waiting longer is no use, but one for all seats of the step."""
        speculator = seat.speculator
        silent = speculator.heard_at <= seat.asked_at and now > self._wait_until(seat)
        if (silent or now - seat.asked_at > self._max_wait_s) and seat.asked_at >= speculator.missed_at:
            speculator.misses += 1
            speculator.missed_at = now

    def _least_loaded(self, sources: tuple[str, ...]) -> Speculator | None:
        same = [speculator for speculator in self._speculators if speculator.sources == sources]
        return min(same, key=lambda s: (not s.responsive, len(s.sequences)), default=None)

    def _seat(self, sequence: Sequence, speculator: Speculator) -> None:
        handle = speculator.next_handle
        speculator.next_handle += 1
        speculator.sequences[handle] = sequence
        budget = self._budget_of(sequence)
        seat = _Seat(speculator, handle)
        seat.ask(len(sequence.tokens), self._clock(), budget)
        self._seats[sequence].append(seat)
        speculator.outbox.assign(handle, sequence, budget)

    @staticmethod
    def _with_global_sources(speculator: Speculator, tree: TokenTree) -> TokenTree:
        if tree.source_masks is None:
            return tree
        masks = tuple(_translate(mask, speculator.source_bits) for mask in tree.source_masks)
        return TokenTree(tree.token_ids, tree.parents, tree.log_probs, masks)


def _translate(mask: int, bits: Iterable[int]) -> int:
    return sum(1 << bit for k, bit in enumerate(bits) if mask >> k & 1)
