"""An attached speculator, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from treeserve_core.features import FeatureRows
from treeserve_verifier.sequence import Sequence

SpeculatorKind = tuple[tuple[str, ...], bool]

_LATENCY_FALLS, _LATENCY_RISES = 0.5, 0.1  # one stall, or the reading of a long prompt, is soon forgotten


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
        latency_s: smoothed time from an ask to its tree, however late; 0 before the first.
        eager: sequences for which it is asked at every step.
        saves: tokens its trees usually save, smoothed over all sequences; a new sequence starts with that.
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
    eager: int = 0
    saves: float = 1.0

    @property
    def kind(self) -> SpeculatorKind:
        """Those of one kind share the sequences; those of different kinds draft side by side."""
        return self.sources, self.is_colocated

    def ask(self, handle: int, now: float) -> None:
        """A tree is asked for."""
        if not self.asked:
            self.silent_since = now
        self.asked[handle] = now

    def heard(self, handle: int, now: float) -> None:
        """The tree that was asked for came. A late one counts too: else only quick ones would ever be seen."""
        latency_s = now - self.asked.pop(handle)
        self.silent_since = now
        if self.latency_s == 0.0:
            self.latency_s = latency_s
        weight = _LATENCY_FALLS if latency_s < self.latency_s else _LATENCY_RISES
        self.latency_s += weight * (latency_s - self.latency_s)

    def is_silent(self, now: float, patience_s: float) -> bool:
        """Whether it has owed a tree for longer than anybody would wait for one."""
        return bool(self.asked) and now - self.silent_since > patience_s
