"""A drafter for a verifier to keep in its own process: trees without a round trip.

On a small model a tree's way through a speculator takes as long as half a token. Sources that need next to no
computing time can draft where the tokens are instead: the same drafter over the same sources, but called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from opentelemetry import trace
from prometheus_client import CollectorRegistry

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.identity import ModelIdentity
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_speculator.config import CHEAP_SOURCES, NGRAM_TABLE, TRAINED, SpeculatorConfig
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.main import build_drafter
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.native import library
from treeserve_speculator.native_drafter import NativeDrafter
from treeserve_speculator.sequence import CommittedTokens, DraftPrices, DraftSequence, DraftWork
from treeserve_speculator.session import DraftSession
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.ngram_table import open_table
from treeserve_speculator.sources.registry import source_names

_log = structlog.get_logger(__name__)


class ColocatedDrafter:
    """What it is told gathers until `draft`, or until `learn` if no tree is asked for. All calls come from one thread.

    Attributes:
        sources: names of its draft sources.
        wants_top_tokens: whether commits are to bring the target's most probable tokens.
    """

    def __init__(self, drafter: Drafter, limits: TreeLimits, metrics: SpeculatorMetrics) -> None:
        self.sources = drafter.source_names
        self.wants_top_tokens = drafter.wants_top_tokens
        self._session = DraftSession(drafter, limits, metrics, trace.NoOpTracer())
        self._works: list[DraftWork] = []
        self._released: list[int] = []

    @property
    def is_due(self) -> bool:
        """Whether a tree is asked for."""
        return any(work.wants_tree for work in self._works)

    def assign(
        self,
        handle: int,
        token_ids: Sequence[int],
        prompt_len: int,
        sampling: SamplingParams,
        limits: SequenceLimits,
        tenant: str,
        budget: int,
    ) -> None:
        """Meet a sequence; a budget of 0 asks for no tree yet."""
        sequence = DraftSequence(
            handle,
            list(token_ids),
            prompt_len,
            sampling,
            budget,
            acceptance=limits.acceptance.rule,
            tenant=tenant,
            preset=limits.preset,
        )
        self._works.append(DraftWork(assigned=(sequence,)))

    def commit(
        self,
        handle: int,
        base_committed_len: int,
        token_ids: tuple[int, ...],
        budget: int,
        top_token_ids: tuple[Sequence[int], ...],
    ) -> None:
        """Progress of a sequence; a positive budget asks for a tree."""
        committed = CommittedTokens(handle, base_committed_len, token_ids, budget, top_token_ids)
        self._works.append(DraftWork(commits=(committed,)))

    def release(self, handle: int) -> None:
        """Forget a sequence, when nobody waits: what it leaves behind takes its time to be stored."""
        self._released.append(handle)

    def draft(self, token_us: float, node: float) -> list[tuple[int, DraftProposal]]:
        """Trees for what was asked, by handle, at these prices (`DraftPrices`)."""
        works, self._works = self._works, []
        return self._session.run([*works, DraftWork(prices=DraftPrices(token_us, node))])

    def learn(self) -> None:
        """Learn from the commits, meet what began and forget what ended: when nobody waits."""
        self._session.learn()
        if not self.is_due:
            works, self._works = self._works, []
            released, self._released = self._released, []
            self._session.run([*works, DraftWork(released=tuple(released))])


def build(
    identity: ModelIdentity,
    model_folder: Path,
    sources: Sequence[str],
    drafter_folder: Path | None,
    max_nodes: int,
    max_depth: int,
    registry: CollectorRegistry,
) -> ColocatedDrafter | NativeDrafter | None:
    """A drafter with these sources, in C++ where that was built; None if there are none.

    Args:
        identity, model_folder: of the target.
        sources: of CHEAP_SOURCES; `trained` stands for those of them that were trained.
        drafter_folder: of trained drafters; without it those that are shipped for the model.
        max_nodes, max_depth: bounds of a tree, the root not counted.
        registry: where its metrics are exported.

    Raises:
        InvalidArgumentError: for a source that takes its time, or cannot be built.
    """
    for name in sources:
        if name not in (*CHEAP_SOURCES, TRAINED):
            raise InvalidArgumentError(
                "colocated_sources", f"{name!r} is none of {', '.join(CHEAP_SOURCES)}, {TRAINED}"
            )
    config = SpeculatorConfig(
        model_folder=model_folder,
        model_name=identity.name,
        sources=tuple(sources),
        drafter_folder=drafter_folder,
        max_nodes=max(max_nodes, 1),
        max_depth=max_depth,
    )
    settings = SourceSettings(config, identity.vocab_size, identity.tokenizer_hash, frozenset(identity.eos_token_ids))
    names = tuple(name for name in source_names(settings) if name in CHEAP_SOURCES)
    if not names:
        return None
    metrics, limits = SpeculatorMetrics(registry), TreeLimits(config.max_nodes, max_depth)
    try:
        library.load()
    except OSError as error:
        _log.warning("drafting in Python, which is slower", reason=str(error))
        return ColocatedDrafter(build_drafter(replace(config, sources=names), identity, metrics), limits, metrics)
    return NativeDrafter(
        names,
        open_table(settings) if NGRAM_TABLE in names else None,
        vocab_size=identity.vocab_size,
        eos_token_ids=identity.eos_token_ids,
        limits=limits,
        metrics=metrics,
    )
