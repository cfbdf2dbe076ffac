"""Whom speculators are asked for: at every step those whose trees pay together, the others seldom and in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from treeserve_core.proposal import DraftProposal
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.echo import Echo
from treeserve_verifier.pacing import Pace
from treeserve_verifier.seat import Seat
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import Speculator

WORTH = 1.5  # a tree must be expected to save that many times its latency: it costs rows and computing time too
_SHARED = 0.5  # of a token's time, while other sequences are open; a guess
_PROBE_SHARE = 0.01  # of all time, for asking where trees are not expected to pay
_TURN_S = 0.001  # a step that is planned takes that much longer than one that runs on; a guess
_LOOK_S = 0.2  # how often it is looked at again whether nodes may be asked for at all


class Asking:
    """Decides whom speculators are asked for, and learns from what came of it. Runs on the event loop only.

    Of all sequences that a speculator drafts for, those that save most together,

        sum over them of gain_s - 1.5 * what asking for all of them takes,
        gain_s = token_s * saves - 1.5 * part * what reading the tokens that were not told yet takes,

    are asked for at every step. `token_s` counts half while other sequences are open; `part` is the share of a tree in
    the tokens that may still follow, (1 + saves) / tokens. All others cost nothing: their speculator is told nothing
    and no top tokens or features are kept for it.

    What their trees would save is learned in two ways. In turn, one of them is asked for after all, so seldom that 1.5
    times what these trees take, for each open sequence, is a hundredth of the time, over all speculators: a step that
    waits for a tree holds up all of them. And where a sequence repeats an earlier passage, which is seen without asking
    (`Echo`), its quickest speculator's tree is expected to save as many tokens as were repeated, less what their rows
    cost.

    It owns of a seat whether it is asked and for how many nodes (`budget`, `eager`, `probed`) and what its trees are
    worth (`pace`), of a speculator `brings` and `probe_at`.

    Args:
        speculators: those attached; the draft desk keeps the list.
        seats: of every open sequence; the draft desk keeps them.
        budget_of: nodes the next tree of a sequence may have.
        prices: what tokens and rows cost at present.

    Attributes:
        present: what they cost when last looked at, before the latest step or when a sequence came after it.
    """

    def __init__(
        self,
        speculators: SequenceOf[Speculator],
        seats: Mapping[Sequence, SequenceOf[Seat]],
        budget_of: Callable[[Sequence], int],
        prices: Callable[[], Prices],
    ) -> None:
        self._speculators = speculators
        self._seats = seats
        self._budget_of = budget_of
        self._prices = prices
        self._echoes: dict[Sequence, Echo] = {}
        self.present = Prices(0.0, 0.0)

    def opened(self, sequence: Sequence) -> None:
        """The sequence will be drafted for."""
        self._echoes[sequence] = Echo()
        self.present = self._prices()

    def seated(self, seat: Seat) -> None:
        """A speculator got a sequence."""
        seat.budget = self._budget_of(seat.sequence)
        self._choose(seat.speculator)

    def closed(self, sequence: Sequence, seats: SequenceOf[Seat]) -> None:
        """The sequence ended, and left these seats."""
        del self._echoes[sequence]
        for seat in seats:
            self._choose(seat.speculator)

    def before_step(self, sequences: SequenceOf[Sequence], now: float) -> None:
        """A step is to decode these sequences: look at the prices and, where that is due, at who may be asked for."""
        self.present = self._prices()
        for speculator in self._speculators:
            if now >= speculator.probe_at:
                speculator.probe_at = now + _LOOK_S
                self._probe(speculator, sequences)

    def listen(self, sequence: Sequence, base_len: int) -> None:
        """Tokens were committed after `base_len`: see whether a sequence that nobody is asked for repeats itself."""
        allowed = [seat for seat in self._seats[sequence] if seat.budget > 0]
        if not allowed:
            return
        echo = self._echoes[sequence]
        if any(seat.eager for seat in self._seats[sequence]):
            echo.restart()
            return
        echo.follow(sequence.tokens, base_len)
        if echo.expected:
            quickest = min(allowed, key=lambda seat: seat.speculator.latency_s)
            if quickest.pace.hope(echo.expected * (1.0 - self.present.row)):
                self._reconsider(quickest)
            if quickest.eager:
                echo.used()

    def may_ask(self, seat: Seat) -> bool:
        """It is the seat's turn: whether any node (`budget`) would pay now."""
        seat.probed = False
        return self.may_draft(seat)

    def may_draft(self, seat: Seat) -> bool:
        """`may_ask`, for a run of steps."""
        seat.budget = self._budget_of(seat.sequence)
        if seat.budget == 0:
            self._choose(seat.speculator)
        return seat.budget > 0

    def came(self, seat: Seat, proposal: DraftProposal, now: float) -> None:
        """The tree that was asked for came. What was committed meanwhile shows already what it would have saved."""
        speculator = seat.speculator
        is_first = speculator.latency_s == 0.0
        took_s = speculator.heard(seat.handle, now)
        if is_first or not seat.eager:  # it was asked for to learn from
            self._put_off(speculator, took_s, now)
        if not seat.pace.follows:
            seat.pace.follow(proposal.tree)
            if len(proposal.tree) == 1:  # the step was planned for nothing; that of others is in the price of rows
                seat.pace.spend(_TURN_S / (self.present.token_s * len(self._seats)))
        self.judge(seat, seat.sequence.tokens[proposal.base_committed_len :], None, seat.known)

    def judge(self, seat: Seat, new: SequenceOf[int], spent: float | None, known: int) -> None:
        """Follow the seat's tree along new tokens; where it ends, what it saved counts from now on.

        Args:
            spent: what its nodes cost; None if the step had no tree.
            known: how many of the tokens, from the first on, it did not save alone.
        """
        if not self._ends(seat.pace, new, spent, known):
            return
        if seat.pace.is_unknown or not seat.eager:
            seat.speculator.surprised(seat.pace.right)
        seat.pace.is_unknown = False
        if seat.pace.saved > 0.0:
            self._echoes[seat.sequence].proved()
        self._reconsider(seat)

    def judge_all(self, seat: Seat, trees: SequenceOf[tuple[float, int]], now: float) -> None:
        """Trees for the sequence were drafted, verified and followed to their ends without being asked for here.

        Args:
            trees: of each what it saved, in tokens, and how many of its tokens came true.
        """
        pace, speculator = seat.pace, seat.speculator
        for saved, right in trees:
            if pace.is_unknown or not seat.eager:
                speculator.surprised(right)
            pace.is_unknown = False
            pace.learn(saved, right)
            if saved > 0.0:
                self._echoes[seat.sequence].proved()
        if seat.probed:
            seat.probed = False
            self._put_off(speculator, speculator.tree_s * len(trees), now)
        self._reconsider(seat)

    def _put_off(self, speculator: Speculator, took_s: float, now: float) -> None:
        """A tree was asked for to learn from, and took that long: when the next one may be."""
        share = _PROBE_SHARE / len(self._speculators)
        pause_s = WORTH * took_s * len(self._seats) / share
        # What the first trees take says little of others: one that was held up must not end all trials.
        speculator.probe_at = now + (min(pause_s, _LOOK_S) if speculator.is_young else pause_s)

    def _ends(self, pace: Pace, new: SequenceOf[int], spent: float | None, known: int) -> bool:
        alone = new[known:]
        if spent is None:
            return pace.committed(new[:known], 0.0) or pace.committed(alone, 1.0 - self.present.row)
        pace.spend(spent)
        each = ((new[:known], 0.0), (alone[:-1], 1.0), (alone[-1:], 0.0))  # the bonus token was not accepted
        return any(pace.committed(tokens, saved) for tokens, saved in each)

    def _reconsider(self, seat: Seat) -> None:
        """What a sequence's trees are expected to save has changed."""
        if seat.eager or self._gain_s(seat) > WORTH * seat.speculator.further_s:
            self._choose(seat.speculator)

    def _choose(self, speculator: Speculator) -> None:
        """Choose the sequences for which it is asked at every step: those that save most, together."""
        seats = self._seats_at(speculator)
        gains_s = sorted(((self._gain_s(seat), seat) for seat in seats if seat.budget > 0), key=lambda each: -each[0])
        count, most_s, saved_s = 0, 0.0, 0.0
        for n, (gain_s, _) in enumerate(gains_s, start=1):
            saved_s += gain_s
            if saved_s - WORTH * speculator.cost_s(n) > most_s:
                count, most_s = n, saved_s - WORTH * speculator.cost_s(n)
        for seat in seats:
            seat.eager = False
        for _, seat in gains_s[:count]:
            seat.eager = True

    def _gain_s(self, seat: Seat) -> float:
        """What a tree for a sequence saves, less its part of what it takes to read the sequence, in seconds."""
        sequence, saves = seat.sequence, seat.pace.saves
        left = max(1, sequence.max_len - len(sequence.tokens))
        part = min(1.0, (1.0 + saves) / left)
        token_s = self.present.token_s * (_SHARED if len(self._seats) > 1 else 1.0)
        return token_s * saves - WORTH * part * seat.speculator.read_s(len(sequence.tokens) - seat.told_len)

    def _probe(self, speculator: Speculator, sequences: SequenceOf[Sequence]) -> None:
        """Look again for whom nodes may be asked for, and have a tree asked for where it is not known to pay."""
        seats = self._seats_at(speculator)
        for seat in seats:
            seat.budget = self._budget_of(seat.sequence)
        quiet = [s for s in seats if s.budget > 0 and not (s.asks or s.waits) and s.sequence in sequences]
        self._choose(speculator)
        if quiet:
            chosen = min(quiet, key=lambda seat: seat.asked_at)
            chosen.probed = True
            chosen.pace.doubt()

    def _seats_at(self, speculator: Speculator) -> list[Seat]:
        sequences = speculator.sequences.values()
        return [seat for sequence in sequences for seat in self._seats[sequence] if seat.speculator is speculator]
