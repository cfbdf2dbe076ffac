"""A sequence as the speculator knows it: what was committed, and what each draft source remembers of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import StaleBaseError
from treeserve_core.features import FeatureRows, FeatureWindow
from treeserve_core.preset import Preset
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.mixture import MixedSequence

FEATURE_TOKENS = 128  # twice what a verifier keeps, so that what a source has not read yet is not lost to newer tokens


@dataclass(frozen=True)
class CommittedTokens:
    """Tokens the target committed to one sequence.

    Attributes:
        base_committed_len: committed length before them.
        budget: nodes the next tree may have, the root not counted.
        top_tokens: for each token what the target held most probable in its place, best first; empty if not asked for.
        features: blocks of the target's hidden states, of these tokens and maybe earlier ones; None if damaged.
    """

    handle: int
    base_committed_len: int
    token_ids: tuple[int, ...]
    budget: int
    top_tokens: tuple[Sequence[int], ...] = ()
    features: tuple[FeatureRows, ...] | None = ()


@dataclass(frozen=True)
class DraftPrices:
    """What a verifier pays at present; zeros while it has not said.

    Attributes:
        token_us: time of plain decoding for one token of one sequence, microseconds.
        node: cost of verifying one draft node, in tokens.
    """

    token_us: float = 0.0
    node: float = 0.0


UNPRICED = DraftPrices()


@dataclass(frozen=True)
class TreeShape:
    """How far a source that grows its tree level by level is to go.

    Attributes:
        depth: deepest level.
        width: nodes expanded per level, and children of each.
        least_mass: path probability that the nodes of a level must have together to be expanded: what a level costs,
            in tokens.
    """

    depth: int
    width: int
    least_mass: float = 0.0


@dataclass(eq=False)
class DraftSequence:
    """One assigned sequence. Changed by its `Drafter` alone; sources read it and keep their own state in it.

    Attributes:
        handle: its name on the verifier's stream.
        tokens: all committed tokens, prompt included; the last one is the root of the next tree.
        budget: nodes the next tree may have, the root not counted.
        traceparent: W3C traceparent of the request's span; empty for none.
        acceptance: how the target will accept drafted tokens.
        tenant: label of whom it is for: what is learnt from it may help sequences of that tenant alone, and none if
            the label is empty.
        preset: what kind of work the request says it is.
        prices: what the verifier pays while the next tree grows.
        shapes: for some sources, by name, how far the next tree is to grow; others decide for themselves.
        tree: the latest tree, until tokens are committed after its root.
        mixed: what mixing the sources' trees has learnt of it.
        features: the target's hidden states of its latest tokens, as they came; None once some came damaged.
        source_state: what each source remembers, by the source's name.
        disabled: names of sources that failed on this sequence.
    """

    handle: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    budget: int
    traceparent: str = ""
    acceptance: AcceptanceRule = AcceptanceRule.REPLAY
    tenant: str = ""
    preset: Preset = Preset.NONE
    prices: DraftPrices = UNPRICED
    shapes: Mapping[str, TreeShape] = field(default_factory=dict)
    tree: TokenTree | None = None
    mixed: MixedSequence = field(default_factory=MixedSequence)
    features: FeatureWindow | None = field(default_factory=lambda: FeatureWindow(FEATURE_TOKENS))
    source_state: dict[str, Any] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is the one to guess: not so where the target draws with noise."""
        return self.sampling.is_greedy or self.acceptance is AcceptanceRule.TYPICAL

    def take_features(self, blocks: Sequence[FeatureRows] | None) -> None:
        """Note features that came; after damaged ones (None) no more are taken."""
        if blocks is None or self.features is None:
            self.features = None
            return
        for rows in blocks:
            self.features.extend(rows)

    def advance(self, base_committed_len: int, token_ids: Sequence[int], budget: int) -> None:
        """Append committed tokens.

        Raises:
            StaleBaseError: if they do not begin where this sequence ends; nothing changes then.
        """
        if base_committed_len != len(self.tokens):
            raise StaleBaseError(f"a commit at {base_committed_len} does not follow {len(self.tokens)} known tokens")
        self.tokens.extend(token_ids)
        self.budget = budget


@dataclass(frozen=True)
class DraftWork:
    """One update of a verifier, to be applied in this order: new sequences, commits, handles released.

    Attributes:
        prices: those of now; None if it said nothing of them.
    """

    assigned: tuple[DraftSequence, ...] = ()
    commits: tuple[CommittedTokens, ...] = ()
    released: tuple[int, ...] = ()
    prices: DraftPrices | None = None

    @property
    def wants_tree(self) -> bool:
        """Whether it asks for a tree."""
        return any(s.budget > 0 for s in self.assigned) or any(c.budget > 0 for c in self.commits)

    @property
    def handles(self) -> set[int]:
        """All sequences it is about."""
        changed = {sequence.handle for sequence in self.assigned} | {committed.handle for committed in self.commits}
        return changed.union(self.released)
