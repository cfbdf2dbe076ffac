"""What a draft source is: it sees a sequence's life and proposes trees for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureShape
from treeserve_core.tree import TokenTree
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.drafter_files import FOLDER_FIELD, DrafterFolder, find_drafters
from treeserve_speculator.sequence import DraftSequence


class DraftSource(Protocol):
    """A way to draft. All calls come from one thread; a source may share what it learns between sequences.

    A call may raise: the drafter counts it, closes the sequence for this source alone and goes on.

    Attributes:
        name: unique among the configured sources.
        wants_top_tokens: ask the verifier for the target's top tokens with each commit.
    """

    name: str
    wants_top_tokens: bool

    def open(self, state: DraftSequence) -> None:
        """Meet a new sequence with its tokens so far."""

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Learn that the target committed `new_tokens`; `state.tokens` already ends with them.

        Args:
            top_tokens: for each new token the ids the target held most probable in its place, best first; may be empty.
        """

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """A tree over the last committed token, the same for the same history; None for no idea.

        Args:
            budget: most nodes wanted, the root not counted; at least 1. A larger tree is pruned.

        Returns:
            A tree whose log_probs are the source's own conditional estimates.
        """

    def close(self, state: DraftSequence) -> None:
        """Forget a sequence; called once for every `open`, also after a failure."""


@runtime_checkable
class BatchDraftSource(DraftSource, Protocol):
    """A source that drafts for several sequences at once more cheaply than one by one."""

    def propose_batch(self, wanted: Sequence[tuple[DraftSequence, int]]) -> list[TokenTree | None]:
        """`propose` for several (sequence, budget) pairs, in order."""


@runtime_checkable
class FeatureDraftSource(DraftSource, Protocol):
    """A source that drafts from the target's hidden states, which it finds in `DraftSequence.features`.

    A verifier that has none of this shape sends none, and the source has no idea then.
    """

    @property
    def feature_shape(self) -> FeatureShape:
        """What it needs; that of all such sources of a speculator is the same."""


@dataclass(frozen=True)
class SourceSettings:
    """What a source may need to know when it is built.

    Attributes:
        vocab_size: token ids of the target's tokenizer; larger ids are padding and must not be proposed.
        tokenizer_hash: identity of that tokenizer.
        name: under which the source is configured.
    """

    config: SpeculatorConfig
    vocab_size: int
    tokenizer_hash: str
    eos_token_ids: frozenset[int]
    name: str = ""

    @cached_property
    def drafters(self) -> DrafterFolder | None:
        """What was trained for the target. Raises InvalidArgumentError if the configured folder was not."""
        path = self.config.model_folder / "config.json"
        hidden_size = json.loads(path.read_text()).get("hidden_size") if path.exists() else None
        return find_drafters(self.config.drafter_folder, self.tokenizer_hash, self.vocab_size, hidden_size)

    def trained_file(self, source: str, hidden_size: int | None = None) -> Path:
        """The file of a source that was trained for the target.

        Args:
            hidden_size: of the target, if the source depends on it.

        Raises:
            InvalidArgumentError: if there is none, it is damaged or was made for another target.
        """
        if self.drafters is None:
            raise InvalidArgumentError(FOLDER_FIELD, f"the {source} source needs a folder of trained drafters")
        self.drafters.check_target(self.tokenizer_hash, self.vocab_size, hidden_size)
        return self.drafters.file(source, self.config.cache_dir)
