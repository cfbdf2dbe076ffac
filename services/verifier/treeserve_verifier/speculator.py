"""An attached speculator, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from treeserve_core.features import FeatureRows
from treeserve_verifier.sequence import Sequence

SpeculatorKind = tuple[tuple[str, ...], bool]

_LATENCY_FALLS, _LATENCY_RISES = 0.5, 0.1  # one stall, or the reading of a long prompt, is soon forgotten
_COST_SMOOTHING = 0.05  # unlike that of latencies even: costs are summed up
_PRIOR_SMOOTHING = 0.05  # the last twenty trees of sequences that were not chosen
_YOUNG = 16  # trees that met things for the first time, and took longer than others will: the least of them counts
_MOST_SURPRISE = 3.0  # of what was expected: a stall is no cost
_READ_UNIT = 32.0  # tokens whose reading is learned as fast as what a tree takes
_FURTHER = 0.15  # what a further tree of the same moment takes of a speculator, in parts of the first


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
    top_token_ids: tuple[SequenceOf[int], ...] = ()


class DraftOutbox(Protocol):
    """Where a speculator's messages gather until its stream sends them. None of these may block."""

    def assign(self, handle: int, sequence: Sequence, budget: int) -> None:
        """A new sequence to draft for; a budget of 0 asks for no tree yet."""

    def commit(self, notice: CommitNotice) -> None:
        """Progress of an assigned sequence."""

    def features(self, handle: int, rows: FeatureRows) -> None:
        """Features of a sequence's tokens, right after `assign` or `commit` told of them."""

    def release(self, handle: int) -> None:
        """The sequence is no longer this speculator's."""


@dataclass(eq=False)
class Speculator:
    """An attached speculator.

    Attributes:
        sources: names of its draft sources, in the order of its source mask bits.
        source_bits: for each of them its bit among all sources this verifier has met.
        is_colocated: it drafts in this process, and nobody counts it as a speculator.
        asked: handles whose tree was asked for and did not come yet, and when.
        silent_since: clock time since which it has owed a tree without sending any.
        latency_s: smoothed time from an ask to its tree, however late; 0 before the first. Of what drafts here, which
            does so for one sequence after the other, its share of that.
        brings: how many tokens of its trees usually come true for a sequence of which nothing is known, whatever rows
            cost.
        tree_s: what asking for one tree takes, smoothed, the reading of what was not told before left out.
        probe_at: clock time from which another sequence may be asked for only to learn what its trees are worth.
    """

    name: str
    sources: tuple[str, ...]
    source_bits: tuple[int, ...]
    outbox: DraftOutbox
    wants_top_tokens: bool = False
    wants_features: bool = False
    is_colocated: bool = False
    next_handle: int = 1
    sequences: dict[int, Sequence] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    silent_since: float = 0.0
    latency_s: float = 0.0
    brings: float = 1.0
    probe_at: float = 0.0
    tree_s: float = 0.0
    _read_s: float = 0.0
    _heard: int = 0
    _together: int = 0  # asked when the latest ask left
    _told: int = 0  # tokens that went with these asks

    @property
    def kind(self) -> SpeculatorKind:
        """Those of one kind share the sequences; those of different kinds draft side by side."""
        return self.sources, self.is_colocated

    def ask(self, handle: int, now: float, told: int = 0) -> None:
        """A tree is asked for, and so many tokens are told with that."""
        if not self.asked:
            self.silent_since = now
            self._told = 0
        self.asked[handle] = now
        self._together = len(self.asked)
        self._told += told

    def cost_s(self, trees: int) -> float:
        """What asking for so many trees at once takes."""
        return self.tree_s + self.further_s * (trees - 1)

    @property
    def is_young(self) -> bool:
        """Whether too few trees came to know what they take."""
        return self._heard < _YOUNG

    @property
    def further_s(self) -> float:
        """What one more tree beside others takes: of what drafts here, one after the other, as much as the first."""
        return self.tree_s if self.is_colocated else self.tree_s * _FURTHER

    def surprised(self, right: int) -> None:
        """So many tokens came true of a tree of a sequence that was not chosen for what its trees save."""
        self.brings += _PRIOR_SMOOTHING * (right - self.brings)

    def read_s(self, tokens: int) -> float:
        """What telling it of so many tokens takes."""
        return self._read_s * tokens

    def heard(self, handle: int, now: float) -> float:
        """The tree that was asked for came. A late one counts too: else only quick ones would ever be seen.

        Returns:
            What it took, in seconds.
        """
        latency_s = now - self.asked.pop(handle)
        told = float(self._told)
        if self.is_colocated:
            latency_s, told = latency_s / self._together, told / self._together
        self.silent_since = now
        self._heard += 1
        if self._heard == 1:
            self.latency_s = self.tree_s = latency_s
        elif self._heard <= _YOUNG:
            self.tree_s = min(self.tree_s, latency_s)
        self._learn_costs(latency_s, told)
        weight = _LATENCY_FALLS if latency_s < self.latency_s else _LATENCY_RISES
        self.latency_s += weight * (latency_s - self.latency_s)
        return latency_s

    def drafted(self, tree_s: float) -> None:
        """It drafted here without being asked, and took that long for a tree."""
        if self.tree_s == 0.0:
            self.tree_s = tree_s
        self._learn_costs(tree_s, 0.0)

    def is_silent(self, now: float, patience_s: float) -> bool:
        """Whether it has owed a tree for longer than anybody would wait for one."""
        return bool(self.asked) and now - self.silent_since > patience_s

    def _learn_costs(self, latency_s: float, told: float) -> None:
        """Split what trees take between the trees and the tokens that were told with the asks (normalised LMS)."""
        expected_s, read = self.tree_s + self._read_s * told, told / _READ_UNIT
        error = min(latency_s - expected_s, _MOST_SURPRISE * expected_s)
        step = _COST_SMOOTHING * error / (1.0 + read * read)
        self.tree_s = max(0.0, self.tree_s + step)
        self._read_s = max(0.0, self._read_s + step * read / _READ_UNIT)
