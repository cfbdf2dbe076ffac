"""A sequence as the speculator knows it: what was committed, and what each draft source remembers of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import StaleBaseError
from treeserve_core.sampling import SamplingParams


@dataclass(frozen=True)
class CommittedTokens:
    """Tokens the target committed to one sequence.

    Attributes:
        base_committed_len: committed length before them.
        budget: nodes the next tree may have, the root not counted.
        top_tokens: for each token what the target held most probable in its place, best first; empty if not asked for.
    """

    handle: int
    base_committed_len: int
    token_ids: tuple[int, ...]
    budget: int
    top_tokens: tuple[tuple[int, ...], ...] = ()


@dataclass(eq=False)
class DraftSequence:
    """One assigned sequence. Changed by its `Drafter` alone; sources read it and keep their own state in it.

    Attributes:
        handle: its name on the verifier's stream.
        tokens: all committed tokens, prompt included; the last one is the root of the next tree.
        budget: nodes the next tree may have, the root not counted.
        traceparent: W3C traceparent of the request's span; empty for none.
        acceptance: how the target will accept drafted tokens.
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
    source_state: dict[str, Any] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)

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
    """One update of a verifier, to be applied in this order: new sequences, commits, handles released."""

    assigned: tuple[DraftSequence, ...] = ()
    commits: tuple[CommittedTokens, ...] = ()
    released: tuple[int, ...] = ()

    @property
    def handles(self) -> set[int]:
        """All sequences it is about."""
        changed = {sequence.handle for sequence in self.assigned} | {committed.handle for committed in self.commits}
        return changed.union(self.released)
