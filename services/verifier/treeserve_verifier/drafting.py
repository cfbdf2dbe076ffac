"""The verifier's side of drafting: which speculator drafts for which sequence, and the trees that came back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from treeserve_core.errors import NotFoundError, StaleBaseError
from treeserve_core.features import FeatureRows, FeatureShape, FeatureWindow
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree, merge
from treeserve_verifier.pacing import MAX_INTERVAL, Pace
from treeserve_verifier.planner import Prices
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.speculator import CommitNotice, DraftOutbox, Speculator, SpeculatorKind

_PRIOR_SMOOTHING = 0.05  # the last twenty trees of all sequences
_NEVER = 2**31
_WORTH = 1.5  # a tree must be expected to save that many times its latency: it costs rows and computing time too


@dataclass(eq=False)
class _Seat:
    """A sequence at one speculator.

    Attributes:
        told_len: committed tokens that the speculator knows of; 0 before the sequence is assigned.
        told_features: place of the token after the last one whose features it was sent.
        pace: what its trees are worth here, and how often it is asked.
        top_token_ids: of the tokens that it was not told yet, if it wants them.
        known: of the tokens that it was not told yet, how many were in trees of quicker speculators.
        tree: what is left of its newest tree under the present root.
        tree_base: committed length for which that was drawn.
        offered: whether a step could use it.
    """

    speculator: Speculator
    handle: int
    pace: Pace
    told_len: int = 0
    told_features: int = 0
    top_token_ids: list[tuple[int, ...]] = field(default_factory=list)
    known: int = 0
    tree: TokenTree | None = None
    tree_base: int = 0
    offered: bool = False

    @property
    def waits(self) -> bool:
        """Whether a tree was asked for and did not come."""
        return self.handle in self.speculator.asked


class DraftDesk:
    """Assigns sequences to speculators, paces the asking, and keeps the trees. Runs on the event loop only.

    Speculators with the same sources share the sequences between them; those with different sources draft side by
    side, and their trees are merged.

    When to wait: the trees that a step lacks are expected to save

        gain_s = token_s * sum over their sequences of max(0, saves - depth of the tree at hand)

    of plain decoding, and hold up the whole step for the speculator's usual latency. The step waits if 1.5 latency_s <
    gain_s, and no longer than gain_s after the speculator was last heard: a pause never costs more than what was hoped
    for. Otherwise it decodes at once, and the next step uses a tree that comes meanwhile, if what was committed lies in
    it.

    Where several draft for one sequence, a tree is credited with what no quicker speculator's tree had.

    When to ask: after each tree, `Pace` decides how many tokens later the next is asked for; until then the speculator
    is sent nothing, and the tokens go with the ask. A tree pays if token_s * saves exceeds its share of 1.5 latency_s,
    which the sequences that are asked for at every step cause together.

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
        self._budget_of = budget_of
        self._prices = prices
        self._speculators: list[Speculator] = []
        self._seats: dict[Sequence, list[_Seat]] = {}
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

    def open(self, sequence: Sequence) -> None:
        """Have the sequence drafted for, unless it is already or its request forbids speculation."""
        if sequence in self._seats or not sequence.submission.limits.speculates:
            return
        self._seats[sequence] = []
        for kind in {speculator.kind for speculator in self._speculators}:
            speculator = self._least_loaded(kind)
            assert speculator is not None  # the kind is that of an attached one
            self._seat(sequence, speculator)

    def close(self, sequence: Sequence) -> None:
        """The sequence ended: release it everywhere."""
        self._features.pop(sequence, None)
        for seat in self._seats.pop(sequence, ()):
            speculator = seat.speculator
            del speculator.sequences[seat.handle]
            speculator.asked.pop(seat.handle, None)
            speculator.eager -= seat.pace.eager
            if seat.told_len > 0:
                speculator.outbox.release(seat.handle)

    def wants_top_tokens(self, sequence: Sequence) -> bool:
        """Whether a speculator of the sequence asked for the target's most probable tokens."""
        return any(seat.speculator.wants_top_tokens for seat in self._seats.get(sequence, ()))

    def wants_features(self, sequence: Sequence) -> bool:
        """Whether a speculator of the sequence gets the target's features."""
        return any(seat.speculator.wants_features for seat in self._seats.get(sequence, ()))

    def computed(self, sequence: Sequence, features: FeatureRows) -> None:
        """A step computed features of the sequence's tokens; they go with the next ask."""
        if self.feature_shape is not None and sequence in self._seats:
            window = self._features.setdefault(sequence, FeatureWindow(self.feature_shape.window_tokens))
            window.extend(features)

    def tokens_until_ask(self, sequence: Sequence) -> int:
        """Tokens after which `committed` asks for a tree at the earliest."""
        untold = (self._interval(seat) - len(sequence.tokens) + seat.told_len for seat in self._seats.get(sequence, ()))
        return min(untold, default=_NEVER)

    def committed(
        self, sequence: Sequence, base_len: int, top_token_ids: tuple[tuple[int, ...], ...], spent: float = 0.0
    ) -> None:
        """Tokens were committed after `base_len`: move the trees along, and ask for the next where one is due.

        Args:
            spent: what the step's draft nodes for the sequence cost, in tokens.
        """
        new = sequence.tokens[base_len:]
        seats = self._seats.get(sequence, ())
        for seat, known in zip(seats, _known_already(seats, new), strict=True):
            seat.known += known
            if seat.speculator.wants_top_tokens and seat.told_len > 0:
                seat.top_token_ids += top_token_ids
            if self._score(seat.pace, new, spent if seat.offered else None, known):
                self._adapt(seat)
            self._move_along(seat, new)
            if len(sequence.tokens) - seat.told_len >= self._interval(seat):
                self._ask(sequence, seat)

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
            speculator.heard(handle, self._clock())
            seat.pace.follow(proposal.tree)
            if self._score(seat.pace, sequence.tokens[base:], None, seat.known):
                self._adapt(seat)
        try:
            tree = proposal.rebased(sequence.tokens)
        except StaleBaseError:
            self.late += 1
            raise
        if base >= seat.tree_base:  # else reordered: a newer tree is here already
            seat.tree, seat.tree_base, seat.offered = _unless_empty(tree), base, False
        return sequence

    def tree(self, sequence: Sequence) -> TokenTree | None:
        """The merged tree under the sequence's present root; None if no speculator has one."""
        trees: list[TokenTree] = []
        for seat in self._seats.get(sequence, ()):
            if seat.tree is not None:
                seat.offered = True
                trees.append(self._with_global_sources(seat.speculator, seat.tree))
        return merge(trees) if trees else None

    def wait_until(self, sequences: SequenceOf[Sequence]) -> float:
        """Clock time until which a step that decodes these sequences should wait for trees; in the past for not."""
        missing: defaultdict[Speculator, float] = defaultdict(float)
        for sequence in sequences:
            for seat in self._seats.get(sequence, ()):
                if seat.waits and seat.told_len == len(sequence.tokens):
                    at_hand = max(seat.tree.depths) if seat.tree is not None else 0
                    missing[seat.speculator] += max(0.0, seat.pace.saves - at_hand)
        if not missing:
            return 0.0
        token_s = self._prices().token_s
        return max(self._wait_until(speculator, token_s * tokens) for speculator, tokens in missing.items())

    def _wait_until(self, speculator: Speculator, gain_s: float) -> float:
        bound_s = min(gain_s, self._max_wait_s)
        return speculator.silent_since + bound_s if _WORTH * speculator.latency_s < bound_s else 0.0

    def _score(self, pace: Pace, new: SequenceOf[int], spent: float | None, known: int) -> bool:
        """Follow the tree along new tokens; True if it ended.

        Args:
            spent: what its nodes cost; None if the step had no tree.
            known: how many of the tokens, from the first on, it did not save alone.
        """
        alone = new[known:]
        if spent is None:
            return pace.committed(new[:known], 0.0) or pace.committed(alone, 1.0 - self._prices().row)
        pace.spend(spent)
        each = ((new[:known], 0.0), (alone[:-1], 1.0), (alone[-1:], 0.0))  # the bonus token was not accepted
        return any(pace.committed(tokens, saved) for tokens, saved in each)

    def _move_along(self, seat: _Seat, new: SequenceOf[int]) -> None:
        if seat.tree is not None:
            left = seat.tree.rerooted(new)
            self.late += left is None and not seat.offered
            seat.tree = None if left is None else _unless_empty(left)
        seat.offered = seat.offered and seat.tree is not None

    def _adapt(self, seat: _Seat) -> None:
        """A tree's end is known: pace the asks for the next ones."""
        speculator, pace = seat.speculator, seat.pace
        speculator.saves += _PRIOR_SMOOTHING * (pace.saves - speculator.saves)
        gain_s = self._prices().token_s * pace.saves
        speculator.eager -= pace.eager
        pace.adapt(gain_s * (speculator.eager + 1) > _WORTH * speculator.latency_s)
        speculator.eager += pace.eager

    @staticmethod
    def _interval(seat: _Seat) -> int:
        # An ask that stays without answer is repeated: its tree, or the sequence itself, may have been lost.
        return MAX_INTERVAL if seat.waits else seat.pace.interval

    def _ask(self, sequence: Sequence, seat: _Seat) -> None:
        """Ask for a tree, unless none would pay."""
        budget = self._budget_of(sequence)
        if budget == 0:
            return
        new, top_token_ids = tuple(sequence.tokens[seat.told_len :]), tuple(seat.top_token_ids)
        notice = CommitNotice(seat.handle, seat.told_len, new, budget, top_token_ids)
        if seat.told_len == 0:
            seat.speculator.outbox.assign(seat.handle, sequence, budget)
        else:
            seat.speculator.outbox.commit(notice)
        self._send_features(sequence, seat)
        seat.told_len = len(sequence.tokens)
        seat.top_token_ids.clear()
        seat.known = 0
        seat.speculator.ask(seat.handle, self._clock())
        self.asks += 1

    def _send_features(self, sequence: Sequence, seat: _Seat) -> None:
        """What the speculator was not sent yet, of the tokens that it was just told of."""
        window = self._features.get(sequence)
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
        speculator.eager += 1
        seat = _Seat(speculator, handle, Pace(min(1.0, speculator.saves)))
        self._seats[sequence].append(seat)
        if self._budget_of(sequence) > 0:  # read the prompt meanwhile: trees are asked for once there is a root
            speculator.outbox.assign(handle, sequence, 0)
            self._send_features(sequence, seat)
            seat.told_len = len(sequence.tokens)

    @staticmethod
    def _with_global_sources(speculator: Speculator, tree: TokenTree) -> TokenTree:
        bits = speculator.source_bits
        if tree.source_masks is None or bits == tuple(range(len(bits))):
            return tree
        return replace(tree, source_masks=tuple(_translate(mask, bits) for mask in tree.source_masks))


def _known_already(seats: SequenceOf[_Seat], new: SequenceOf[int]) -> list[int]:
    """For each seat how many of the new tokens, from the first on, a quicker speculator's tree had."""
    if len(seats) < 2:
        return [0] * len(seats)
    had = [(seat.speculator.latency_s, _depth_along(seat.tree, new)) for seat in seats]
    return [max((depth for latency_s, depth in had if latency_s < own), default=0) for own, _ in had]


def _depth_along(tree: TokenTree | None, new: SequenceOf[int]) -> int:
    """How many of the tokens lie in a tree, from its root's children on."""
    node = 0
    for depth, token_id in enumerate(new):
        child = tree.child(node, token_id) if tree is not None else None
        if child is None:
            return depth
        node = child
    return len(new)


def _translate(mask: int, bits: Iterable[int]) -> int:
    return sum(1 << bit for k, bit in enumerate(bits) if mask >> k & 1)


def _unless_empty(tree: TokenTree) -> TokenTree | None:
    return tree if len(tree) > 1 else None
