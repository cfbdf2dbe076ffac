"""Offline replay: what the service would accept of a drafter's trees, from recorded plain outputs of the target.

Acceptance is replay of one sampler: whatever the tree, the verifier emits the tokens of plain decoding. Where those are
known, following them through the trees gives each step's accepted tokens without a verifier:

    drafter = build_drafter(config, identity, metrics)
    tallies = replay(drafter, recordings, nodes=8)
    Tally.total(tallies.values()).acceptance_length
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.acceptance.tally import Tally
from treeserve_core.features import FeatureRows
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.sequence import UNPRICED, CommittedTokens, DraftPrices, DraftSequence
from treeserve_speculator.sources.base import DraftSource

MAX_DEPTH = 16
_TENANT = "all"  # without a gateway that names them, all requests are one tenant's
_TIMED = ("commit", "propose", "propose_batch")  # the prompt is met while the target computes it
_TENANT = "benchmark"  # all recordings are one tenant's: what finished responses teach is used for later ones


class Recording(Protocol):
    """One plain output of the target. `treeserve_training.records.Sample` is one.

    Attributes:
        prompt_ids: at least one.
        output_ids: at least one; the last is an end of sequence, or the output was cut at a length.
        kind: of the task.
        temperature, seed: with which it was sampled, without other processors.
        top_ids: integers[len(output_ids), k]: for each token what the target held most probable in its place.
    """

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def output_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def top_ids(self) -> npt.NDArray[Any]: ...  # noqa: D102


@dataclass(frozen=True)
class Step:
    """One verify step, for those who want to see each.

    Attributes:
        tree: as verified.
        path: accepted nodes.
        token_ids: emitted: the accepted tokens and the bonus token.
    """

    recording: Recording
    tree: TokenTree
    path: tuple[int, ...]
    token_ids: tuple[int, ...]


class SourceClock:
    """Measures the time that each source takes, from now on, in the calls of its life.

    A call inside another call of the same source counts once.
    """

    def __init__(self, sources: Iterable[DraftSource], clock_s: Callable[[], float] = time.thread_time) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock_s = clock_s
        self._inside: set[str] = set()
        for source in sources:
            for name in _TIMED:
                if hasattr(source, name):
                    setattr(source, name, self._timed(source.name, getattr(source, name)))

    def _timed(self, source: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if source in self._inside:
                return call(*args, **kwargs)
            self._inside.add(source)
            began = self._clock_s()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[source] += self._clock_s() - began
                self._inside.remove(source)

        return timed


def replay(
    drafter: Drafter,
    recordings: Iterable[Recording],
    nodes: int,
    *,
    coupled: bool = True,
    max_depth: int = MAX_DEPTH,
    eos_token_ids: Iterable[int] = (),
    prices: DraftPrices = UNPRICED,
    features: Callable[[Recording], FeatureRows] | None = None,
    choose: Callable[[TokenTree], TokenTree] | None = None,
    watch: Callable[[Step], None] | None = None,
    source_clock: SourceClock | None = None,
    clock_s: Callable[[], float] = time.thread_time,
) -> dict[str, Tally]:
    """Draft for recorded outputs one after the other, as if each were being generated alone.

    The drafter keeps between recordings what it keeps between requests, so give each measurement a fresh one.

    Args:
        nodes: budget of each tree, the root not counted.
        coupled: whether the drafter is told the temperature and seed, as the service does. If not, it drafts for
            sampled text what it would draft for greedy text.
        eos_token_ids: by these an output ended by itself; others were cut, and no tree reaches beyond the cut.
        prices: as the verifier tells them; without them the drafter asks every source and leaves out no node.
        features: the target's hidden states from some token of a prompt to the last of its output, if the drafter wants
            them.
        choose: which part of those `nodes` best nodes is verified; without it all.
        watch: told of each step.
        source_clock: of the drafter's sources, for the times by source.
        clock_s: times the drafter; by default computing time of this thread, which a busy neighbour does not lengthen.

    Returns:
        Counts by kind.
    """
    ends = frozenset(eos_token_ids)
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    handles = itertools.count(1)
    for recording in recordings:
        sampling = SamplingParams(temperature=recording.temperature, seed=recording.seed)
        sequence = DraftSequence(
            next(handles),
            list(recording.prompt_ids),
            len(recording.prompt_ids),
            sampling if coupled else SamplingParams(),
            nodes,
            tenant=_TENANT,
        )
        run = _Run(drafter, recording, sequence, recording.output_ids[-1] not in ends, clock_s)
        if features is not None:
            run.features = features(recording)
        tally = tallies[recording.kind]
        before = dict(source_clock.seconds) if source_clock is not None else {}
        drafter.open(sequence)
        run.commit(1)  # the prefill's own token
        while run.left > 0:
            tree = run.draft(TreeLimits(nodes, max_depth), prices)
            tree = tree.pruned(nodes, run.deepest)
            if choose is not None:
                tree = choose(tree)
            path = followed(tree, run.ahead)
            emitted = min(len(path) + 1, run.left)
            tally.record(tree, path, emitted, drafter.source_names)
            if watch is not None:
                watch(Step(recording, tree, path, tuple(run.ahead[:emitted])))
            run.commit(emitted)
        drafter.close(sequence)
        tally.draft_s += run.draft_s
        if source_clock is not None:
            tally.source_s.update({name: s - before.get(name, 0.0) for name, s in source_clock.seconds.items()})
    return dict(tallies)


def followed(tree: TokenTree, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Nodes of the tree along the tokens that come after its root, as far as they are in it."""
    path: list[int] = []
    for token_id in token_ids:
        child = tree.child(path[-1] if path else 0, token_id)
        if child is None:
            break
        path.append(child)
    return tuple(path)


class _Run:
    """One recording on its way through the drafter."""

    def __init__(
        self,
        drafter: Drafter,
        recording: Recording,
        sequence: DraftSequence,
        was_cut: bool,
        clock_s: Callable[[], float],
    ) -> None:
        self._drafter = drafter
        self._sequence = sequence
        self._was_cut = was_cut
        self._clock_s = clock_s
        self._output = recording.output_ids
        self._top: list[list[int]] = np.asarray(recording.top_ids).tolist() if drafter.wants_top_tokens else []
        self._done = 0
        self.features: FeatureRows | None = None
        self.draft_s = 0.0

    @property
    def left(self) -> int:
        """Tokens still to come."""
        return len(self._output) - self._done

    @property
    def ahead(self) -> tuple[int, ...]:
        """Those tokens."""
        return self._output[self._done :]

    @property
    def deepest(self) -> int | None:
        """Deepest node that is of use: the verifier knows where an output will be cut, not where it ends by itself."""
        return self.left - 1 if self._was_cut else None

    def draft(self, limits: TreeLimits, prices: DraftPrices) -> TokenTree:
        """The drafter's tree under the present root."""
        if self.deepest == 0:
            return TokenTree.root_only(self._sequence.tokens[-1])
        began = self._clock_s()
        (proposal,) = self._drafter.draft([self._sequence], limits, prices)
        self.draft_s += self._clock_s() - began
        return proposal.tree

    def commit(self, count: int) -> None:
        """Tell the drafter of the next tokens."""
        begin, end, known = self._done, self._done + count, len(self._sequence.tokens)
        committed = CommittedTokens(
            self._sequence.handle,
            known,
            self._output[begin:end],
            self._sequence.budget,
            tuple(map(tuple, self._top[begin:end])),
            self._features_until(known + count),
        )
        began = self._clock_s()
        self._drafter.commit(self._sequence, committed)
        self._drafter.learn()
        self.draft_s += self._clock_s() - began
        self._done = end

    def _features_until(self, place: int) -> tuple[FeatureRows, ...]:
        """Those that were not told yet: at first the prompt's, too."""
        rows = self.features
        if rows is None:
            return ()
        told = place - rows.first
        self.features = FeatureRows(place, rows.values[told:])
        return (FeatureRows(rows.first, rows.values[:told]),)
