"""The verifier's side of drafting: which speculator drafts for which sequence, and the trees that came back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.features import FeatureRows, FeatureShape, FeatureWindow
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree, merge
from treeserve_verifier.asking import WORTH, Asking
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.pacing import Pace
from treeserve_verifier.seat import Seat, known_already
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice, DraftOutbox, Speculator, SpeculatorKind

_NEVER = 2**31
_MOST_FORCED = 32  # tokens that a grammar brings at a time
_UNANSWERED = 32  # tokens after which an ask that stayed without answer is repeated


class DraftDesk:
    """Assigns sequences to speculators, tells them what was committed, and keeps the trees. On the event loop only.

    Speculators with the same sources share the sequences between them; those with different sources draft side by
    side, and their trees are merged. Whom to ask for is `Asking`'s decision.

    When to wait: the trees that a step lacks are expected to save

        gain_s = token_s * sum over their sequences of max(0, saves - depth of the tree at hand)

    of plain decoding, and hold up the whole step for the speculator's usual latency. The step waits if 1.5 latency_s <
    gain_s, and no longer than gain_s after the speculator was last heard: a pause never costs more than what was hoped
    for. Otherwise it decodes at once, and the next step uses a tree that comes meanwhile, if what was committed lies in
    it.

    Where several draft for one sequence, a tree is credited with what no quicker speculator's tree had.

    Args:
        max_wait_s: bound on any wait.
        budget_of: nodes the next tree of a sequence may have.
        prices: what tokens and rows cost at present.
        feature_shape: of the features that steps can export; None for none.

    Attributes:
        asks: trees asked for.
        late: trees that came when nothing of them fitted any more.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        max_wait_s: float,
        budget_of: Callable[[Sequence], int],
        prices: Callable[[], Prices],
        feature_shape: FeatureShape | None = None,
    ) -> None:
        self.feature_shape = feature_shape
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._speculators: list[Speculator] = []
        self._seats: dict[Sequence, list[Seat]] = {}
        self._asking = Asking(self._speculators, self._seats, budget_of, prices)
        self._features: dict[Sequence, FeatureWindow] = {}  # of the sequences whose speculators want them
        self._source_names: list[str] = []
        self.asks = 0
        self.late = 0

    @property
    def speculators(self) -> tuple[Speculator, ...]:
        """Attached speculators, those in this process not counted."""
        return tuple(speculator for speculator in self._speculators if not speculator.is_colocated)

    def source_names(self, mask: int) -> list[str]:
        """Names of the sources in a merged tree's mask."""
        return [name for bit, name in enumerate(self._source_names) if mask >> bit & 1]

    def attach(
        self,
        name: str,
        sources: tuple[str, ...],
        outbox: DraftOutbox,
        *,
        wants_top_tokens: bool,
        wants_features: FeatureShape | None = None,
        is_colocated: bool = False,
    ) -> Speculator:
        """Add a speculator and give it its share of the sequences that are open.

        Args:
            wants_features: the features it wants, if any; it gets none of another shape than `feature_shape`.
            is_colocated: it drafts in this process.
        """
        for source in sources:
            if source not in self._source_names:
                self._source_names.append(source)
        bits = tuple(self._source_names.index(source) for source in sources)
        gets_features = wants_features is not None and wants_features == self.feature_shape
        speculator = Speculator(name, sources, bits, outbox, wants_top_tokens, gets_features, is_colocated)
        self._speculators.append(speculator)
        for sequence, seats in self._seats.items():
            if all(seat.speculator.kind != speculator.kind for seat in seats):
                self._seat(sequence, speculator)
        return speculator

    def detach(self, speculator: Speculator) -> None:
        """Remove a speculator; its sequences go to another with the same sources if there is one."""
        self._speculators.remove(speculator)
        for sequence in speculator.sequences.values():
            seats = self._seats[sequence]
            seats[:] = [seat for seat in seats if seat.speculator is not speculator]
            heir = self._least_loaded(speculator.kind)
            if heir is not None:
                self._seat(sequence, heir)
        speculator.sequences.clear()

    def open(self, sequence: Sequence) -> None:
        """Have the sequence drafted for, unless it is already or its request forbids speculation."""
        if sequence in self._seats or not sequence.submission.limits.speculates:
            return
        self._seats[sequence] = []
        self._asking.opened(sequence)
        for kind in {speculator.kind for speculator in self._speculators}:
            speculator = self._least_loaded(kind)
            assert speculator is not None  # the kind is that of an attached one
            self._seat(sequence, speculator)

    def close(self, sequence: Sequence) -> None:
        """The sequence ended: release it everywhere."""
        self._features.pop(sequence, None)
        seats = self._seats.pop(sequence, None)
        if seats is None:
            return
        for seat in seats:
            speculator = seat.speculator
            del speculator.sequences[seat.handle]
            speculator.asked.pop(seat.handle, None)
            if seat.told_len > 0:
                speculator.outbox.release(seat.handle)
        self._asking.closed(sequence, seats)

    def wants_top_tokens(self, sequence: Sequence) -> bool:
        """Whether a speculator that is asked after the next step wants the target's most probable tokens."""
        return any(seat.asks and seat.speculator.wants_top_tokens for seat in self._seats.get(sequence, ()))

    def wants_features(self, sequence: Sequence) -> bool:
        """Whether a speculator that is asked after the next step gets the target's features."""
        return any(seat.asks and seat.speculator.wants_features for seat in self._seats.get(sequence, ()))

    def computed(self, sequence: Sequence, features: FeatureRows) -> None:
        """A step computed features of the sequence's tokens; they go with the next ask."""
        if self.feature_shape is not None and sequence in self._seats:
            window = self._features.setdefault(sequence, FeatureWindow(self.feature_shape.window_tokens))
            window.extend(features)

    def tokens_until_ask(self, sequence: Sequence) -> int:
        """Tokens after which `committed` asks for a tree at the earliest, unless `wait_until` comes before."""
        asking = (seat for seat in self._seats.get(sequence, ()) if seat.asks)
        untold = (_UNANSWERED - len(sequence.tokens) + seat.told_len if seat.waits else 1 for seat in asking)
        return min(untold, default=_NEVER)

    def committed(
        self, sequence: Sequence, base_len: int, top_token_ids: tuple[SequenceOf[int], ...], spent: float = 0.0
    ) -> None:
        """Tokens were committed after `base_len`: move the trees along, and ask for the next where one is due.

        Args:
            spent: what the step's draft nodes for the sequence cost, in tokens.
        """
        seats = self._seats.get(sequence)
        if not seats:
            return
        self._asking.listen(sequence, base_len)
        seats = [seat for seat in seats if not seat.is_idle]
        if not seats:
            return
        new = sequence.tokens[base_len:]
        for seat, known in zip(seats, known_already(seats, new), strict=True):
            seat.known += known
            if seat.speculator.wants_top_tokens:
                seat.note_top_tokens(base_len, top_token_ids)
            self._asking.judge(seat, new, spent if seat.offered else None, known)
            self.late += seat.move_along(new)
            if seat.asks and (not seat.waits or len(sequence.tokens) - seat.told_len >= _UNANSWERED):
                self._ask(seat)

    def expects_trees(self, sequences: SequenceOf[Sequence], runs_draft: bool) -> bool:
        """Whether trees for them come, or are to come, from anybody that a run of steps does not call.

        Args:
            runs_draft: whether it calls the drafter in this process.
        """
        now = self._clock()
        seats = (seat for sequence in sequences for seat in self._seats.get(sequence, ()))
        others = (seat for seat in seats if not (runs_draft and seat.speculator.is_colocated))
        return any(
            seat.tree is not None
            or ((seat.asks or seat.waits) and not seat.speculator.is_silent(now, self._max_wait_s))
            for seat in others
        )

    def before_run(self, sequences: SequenceOf[Sequence]) -> dict[Sequence, Seat]:
        """A run of steps is to decode these sequences: the seats of a drafter in this process that is to draft."""
        self._asking.before_step(sequences, self._clock())
        drafted: dict[Sequence, Seat] = {}
        for sequence in sequences:
            for seat in self._seats.get(sequence, ()):
                if seat.speculator.is_colocated and (seat.waits or (seat.asks and self._asking.may_draft(seat))):
                    drafted[sequence] = seat
        for seat in drafted.values():
            if seat.told_len < len(seat.sequence.tokens):
                self._tell(seat, 0)
        return drafted

    def ran(
        self, sequence: Sequence, base_len: int, seat: Seat | None, trees: SequenceOf[tuple[float, int]] = ()
    ) -> None:
        """A run committed tokens after `base_len`.

        Args:
            seat: what `before_run` had for the sequence: its drafter knows these tokens.
            trees: of each of its trees what it saved, in tokens, and how many of its tokens came true.
        """
        if seat is None:
            self.committed(sequence, base_len, ())
            return
        self._asking.listen(sequence, base_len)
        seat.told_len, seat.known, seat.ran = len(sequence.tokens), 0, True
        seat.top_token_ids.clear()
        seat.speculator.asked.pop(seat.handle, None)
        seat.forget_tree()
        self._asking.judge_all(seat, trees, self._clock())

    def after_runs(self, sequences: SequenceOf[Sequence]) -> None:
        """Steps are planned here again: ask for the trees that runs drafted by themselves."""
        for sequence in sequences:
            for seat in self._seats.get(sequence, ()):
                if seat.ran and seat.asks and not seat.waits:
                    self._ask(seat)
                seat.ran = False

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
        base = proposal.base_committed_len
        if seat.waits and base == seat.told_len:
            self._asking.came(seat, proposal, self._clock())
        try:
            tree = proposal.rebased(sequence.tokens)
        except StaleBaseError:
            self.late += 1
            raise
        seat.take(tree, base)
        return sequence

    def tree(self, sequence: Sequence) -> TokenTree | None:
        """The merged tree under the sequence's present root, with what its grammar forces; None if there is none."""
        offers = (seat.offer() for seat in self._seats.get(sequence, ()))
        trees = [tree for tree in offers if tree is not None]
        if forced := self._forced(sequence):
            chain = [sequence.tokens[-1], *forced[:_MOST_FORCED]]
            trees.append(TokenTree.chain(chain, [0.0] * len(chain)))
        return merge(trees) if trees else None

    def has_forced(self, sequence: Sequence) -> bool:
        """Whether its grammar leaves no choice of the next token, and its request allows trees."""
        return bool(self._forced(sequence))

    def wait_until(self, sequences: SequenceOf[Sequence]) -> float:
        """Clock time until which a step that decodes these sequences should wait for trees; in the past for not.

        It is called before every step: what is asked for after it is decided here, where that is due.
        """
        self._asking.before_step(sequences, self._clock())
        missing: defaultdict[Speculator, float] = defaultdict(float)
        for sequence in sequences:
            for seat in self._seats.get(sequence, ()):
                if seat.waits and seat.told_len == len(sequence.tokens):
                    at_hand = max(seat.tree.depths) if seat.tree is not None else 0
                    missing[seat.speculator] += max(0.0, seat.pace.saves - at_hand)
        if not missing:
            return 0.0
        token_s = self._asking.present.token_s
        return max(self._wait_until(speculator, token_s * tokens) for speculator, tokens in missing.items())

    def _forced(self, sequence: Sequence) -> SequenceOf[int]:
        return sequence.sampler.forced() if sequence in self._seats else ()

    def _wait_until(self, speculator: Speculator, gain_s: float) -> float:
        bound_s = min(gain_s, self._max_wait_s)
        return speculator.silent_since + bound_s if WORTH * speculator.latency_s < bound_s else 0.0

    def _ask(self, seat: Seat) -> None:
        """Ask for a tree, unless none would pay."""
        if not self._asking.may_ask(seat):
            return
        told = len(seat.sequence.tokens) - seat.told_len
        self._tell(seat, seat.budget)
        seat.known = 0
        seat.asked_at = self._clock()
        seat.speculator.ask(seat.handle, seat.asked_at, told)
        self.asks += 1

    def _tell(self, seat: Seat, budget: int) -> None:
        """Tell a speculator what it does not know of a sequence; a budget above 0 asks for a tree."""
        new, top_token_ids = tuple(seat.sequence.tokens[seat.told_len :]), tuple(seat.top_token_ids)
        if seat.told_len == 0:
            seat.speculator.outbox.assign(seat.handle, seat.sequence, budget)
        else:
            seat.speculator.outbox.commit(CommitNotice(seat.handle, seat.told_len, new, budget, top_token_ids))
        self._told(seat)
        seat.top_token_ids.clear()

    def _told(self, seat: Seat) -> None:
        """The speculator was told of all tokens: what it was not sent yet of their features follows."""
        seat.told_len = len(seat.sequence.tokens)
        window = self._features.get(seat.sequence)
        if window is None or not seat.speculator.wants_features:
            return
        if (rows := window.since(seat.told_features)) is not None:
            seat.speculator.outbox.features(seat.handle, rows)
            seat.told_features = window.end

    def _least_loaded(self, kind: SpeculatorKind) -> Speculator | None:
        now = self._clock()
        same = [speculator for speculator in self._speculators if speculator.kind == kind]
        return min(same, key=lambda s: (s.is_silent(now, self._max_wait_s), len(s.sequences)), default=None)

    def _seat(self, sequence: Sequence, speculator: Speculator) -> None:
        handle = speculator.next_handle
        speculator.next_handle += 1
        speculator.sequences[handle] = sequence
        expected = min(1.0, speculator.brings) * max(0.0, 1.0 - self._asking.present.row)  # less what its rows cost
        seat = Seat(sequence, speculator, handle, Pace(expected))
        self._seats[sequence].append(seat)
        self._asking.seated(seat)
        if seat.eager and not speculator.is_colocated:  # it reads the prompt meanwhile, trees are asked for later
            speculator.outbox.assign(handle, sequence, 0)
            self._told(seat)
