"""A drafter for a verifier to keep in its own process, in C++: no interpreter between two sources of a tree.

It drafts what `ColocatedDrafter` drafts with the same sources, the mixture and what it learns included; tests compare
the trees. Two things differ. What the target held most probable (`recycling`) is read when nobody waits, one step
later. And where draws must not depend on the target's noise (`multi_step` at a temperature) the n-gram table is not
asked, because it draws nothing here.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_kernels.cpu.structures import DrafterCalls
from treeserve_speculator.drafter import TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.native import library
from treeserve_speculator.sources.ngram_table_file import NgramTable

# Type of each, None for any unsigned one, and whether there is one number for each bucket, context or entry.
_TABLE_ARRAYS = {
    "first_context": (np.uint32, "buckets"),
    "first_token": (np.uint32, "buckets"),
    "fingerprints": (np.uint16, "contexts"),
    "lengths": (np.uint8, "contexts"),
    "token_ids": (None, "entries"),
    "log_probs": (np.uint8, "entries"),
}


class _Told(NamedTuple):
    """What the target held most probable in place of the tokens from a position on, best first."""

    handle: int
    position: int
    top_token_ids: tuple[Sequence[int], ...]


class NativeDrafter:
    """What it is told gathers until `draft`, or until `learn` if no tree is asked for. All calls come from one thread,
    those of runs of steps aside.

    Args:
        sources: out of `library.SOURCES`, in the order of their bits.
        table: of the source `ngram_table`.
        vocab_size: token ids are below it.
        max_shared_nodes, max_shared_rows: bounds of what all tenants leave behind, as `SuffixSource` and
            `RecyclingSource` have them.

    Attributes:
        sources: names of its draft sources.
        wants_top_tokens: whether commits are to bring the target's most probable tokens.

    Raises:
        OSError: if the shared object does not load.
        ValueError: for an unknown source, or a table that is none.
    """

    def __init__(
        self,
        sources: Sequence[str],
        table: NgramTable | None,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: TreeLimits,
        metrics: SpeculatorMetrics,
        max_shared_nodes: int = 500_000,
        max_shared_rows: int = 200_000,
    ) -> None:
        self.sources = tuple(sources)
        self.wants_top_tokens = "recycling" in sources
        self._library = library.load()
        self._table = table  # its arrays are read until the end
        config = _config(self.sources, table, vocab_size, eos_token_ids, limits)
        config.max_shared_nodes, config.max_shared_rows = max_shared_nodes, max_shared_rows
        self._drafter = ctypes.c_void_p()
        library.check(self._library.ts_drafter_create(config, self._drafter))
        weakref.finalize(self, self._library.ts_drafter_destroy, self._drafter)
        self._calls = library.calls_of(self._drafter)
        self._metrics = metrics
        self._counters = [metrics.of_source(name) for name in self.sources]
        self._counted = [(0.0, 0, 0, 0)] * len(self.sources)
        self._works: list[Callable[[], None]] = []
        self._released: list[int] = []
        self._due: dict[int, int] = {}  # budgets by handle, in the order in which they were told of; 0 for no tree
        self._told: list[_Told] = []

    @property
    def is_due(self) -> bool:
        """Whether a tree is asked for."""
        return any(self._due.values())

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
        rule = limits.acceptance.rule
        is_greedy = sampling.is_greedy or rule is AcceptanceRule.TYPICAL  # probable tokens pass, whatever the noise
        tokens = _int32(token_ids)
        sequence = library.AssignedSequence(
            token_ids=tokens.ctypes.data_as(library.Int32s),
            num_tokens=len(tokens),
            prompt_len=prompt_len,
            temperature=0.0 if is_greedy else sampling.temperature,
            seed=sampling.seed,
            asks_table=is_greedy or rule is not AcceptanceRule.MULTI_STEP,
            tenant=_c_string(tenant),
        )
        self._works.append(partial(self._assign, handle, sequence, tokens))
        self._due[handle] = budget

    def commit(
        self,
        handle: int,
        base_committed_len: int,
        token_ids: tuple[int, ...],
        budget: int,
        top_token_ids: tuple[Sequence[int], ...],
    ) -> None:
        """Progress of a sequence; a positive budget asks for a tree."""
        told = _Told(handle, base_committed_len, top_token_ids[: len(token_ids)])
        self._works.append(partial(self._commit, told, _int32(token_ids)))
        self._due[handle] = budget

    def release(self, handle: int) -> None:
        """Forget a sequence, when nobody waits: what it leaves behind takes its time to be stored."""
        self._released.append(handle)

    def draft(self, token_us: float, node: float) -> list[tuple[int, DraftProposal]]:
        """Trees for what was asked, by handle.

        Args:
            node: cost of verifying one draft node, in tokens.
        """
        began = time.perf_counter()
        self._catch_up()
        due, self._due = self._due, {}
        tree = library.DraftedTree()
        trees = []
        for handle, budget in due.items():
            if budget <= 0:
                continue
            library.check(self._library.ts_drafter_draft(self._drafter, handle, budget, node, tree))
            trees.append((handle, tree.base_len, _token_tree(tree)))
        seconds = time.perf_counter() - began
        self._metrics.draft_seconds.observe(seconds)
        self._metrics.trees.inc(len(trees))
        self._metrics.empty_trees.inc(sum(len(tree) == 1 for _, _, tree in trees))
        return [(handle, DraftProposal(base, tree, round(1e6 * seconds))) for handle, base, tree in trees]

    def begin_run(self, handles: Sequence[int]) -> DrafterCalls:
        """What a run of steps calls for these sequences (`treeserve_kernels.cpu.decode_run`), from any thread.

        What it was told of them before is passed on; trees that were asked for them the run drafts itself.
        """
        self._catch_up()
        for handle in handles:
            self._due.pop(handle, None)
        return self._calls

    def end_run(self, trees: int, empty_trees: int, seconds: float) -> None:
        """A run drafted so many trees, so many of them with nothing but a root."""
        if trees:
            self._metrics.draft_seconds.observe(seconds / trees)
        self._metrics.trees.inc(trees)
        self._metrics.empty_trees.inc(empty_trees)

    def learn(self) -> None:
        """Learn from the commits, meet what began and forget what ended: when nobody waits."""
        library.check(self._library.ts_drafter_learn(self._drafter))
        self._count()
        if not self.is_due:
            self._catch_up()
            self._due.clear()
            self._remember()
            self._release()

    def _catch_up(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work()

    def _assign(self, handle: int, sequence: library.AssignedSequence, tokens: object) -> None:
        """`tokens` are what the sequence points to."""
        library.check(self._library.ts_drafter_assign(self._drafter, handle, sequence))
        self._metrics.sequences.inc()

    def _commit(self, told: _Told, tokens: npt.NDArray[np.int32]) -> None:
        pointer = tokens.ctypes.data_as(library.Int32s)
        library.check(self._library.ts_drafter_commit(self._drafter, told.handle, told.position, pointer, len(tokens)))
        if told.top_token_ids:
            self._told.append(told)

    def _release(self) -> None:
        released, self._released = self._released, []
        for handle in released:
            library.check(self._library.ts_drafter_release(self._drafter, handle))
            self._metrics.sequences.dec()

    def _remember(self) -> None:
        all_told, self._told = self._told, []
        for handle, position, top in all_told:
            width = max(map(len, top))
            rows = np.full((len(top), width), library.NOTHING, np.int32)  # of some tokens nothing is told
            for row, token_ids in zip(rows, map(tuple, top), strict=True):
                row[: len(token_ids)] = token_ids
            pointer = rows.ctypes.data_as(library.Int32s)
            library.check(self._library.ts_drafter_remember(self._drafter, handle, position, pointer, *rows.shape))

    def _count(self) -> None:
        counts = (library.SourceCounts * len(self.sources))()
        self._library.ts_drafter_counts(self._drafter, counts)
        for i, (counters, count) in enumerate(zip(self._counters, counts, strict=True)):
            seconds, nodes, visits, right = self._counted[i]
            counters.seconds.inc(count.seconds - seconds)
            counters.nodes.inc(count.nodes - nodes)
            counters.visits.inc(count.visits - visits)
            counters.right.inc(count.right - right)
            self._counted[i] = count.seconds, count.nodes, count.visits, count.right


def _config(
    sources: Sequence[str],
    table: NgramTable | None,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    limits: TreeLimits,
) -> library.DraftingConfig:
    return library.DraftingConfig(
        sources=(ctypes.c_int32 * len(sources))(*map(_number, sources)),
        eos=(ctypes.c_int32 * len(eos_token_ids))(*eos_token_ids),
        num_sources=len(sources),
        num_eos=len(eos_token_ids),
        vocab_size=vocab_size,
        max_nodes=limits.max_nodes,
        max_depth=limits.max_depth,
        table=None if table is None else ctypes.pointer(_table_arrays(table)),
    )


def _number(source: str) -> int:
    if source not in library.SOURCES:
        raise ValueError(f"an unknown source: {source}")
    return library.SOURCES.index(source)


def _int32(token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    try:
        return np.asarray(token_ids, np.int32)
    except OverflowError as error:
        raise ValueError(f"a token id: {error}") from error


def _c_string(text: str) -> bytes:
    """Different ones for different texts: a zero, which ends a C string, becomes a byte that is in no UTF-8."""
    return text.encode(errors="surrogatepass").replace(b"\0", b"\xff")


def _table_arrays(table: NgramTable) -> library.NgramTableArrays:
    arrays = {name: table.arrays[name] for name in _TABLE_ARRAYS}
    counts = {kind: len(arrays[name]) for name, (_, kind) in _TABLE_ARRAYS.items()}
    for name, (dtype, kind) in _TABLE_ARRAYS.items():
        array = arrays[name]
        is_right = array.dtype.kind == "u" if dtype is None else array.dtype == dtype
        if not is_right or array.shape != (counts[kind],) or not array.flags.c_contiguous:
            raise ValueError(f"the table's {name}")
    calibration = table.calibration
    return library.NgramTableArrays(
        **{name: array.ctypes.data for name, array in arrays.items()},
        num_buckets=counts["buckets"] - 1,
        num_contexts=counts["contexts"],
        num_entries=counts["entries"],
        token_bytes=arrays["token_ids"].itemsize,
        max_order=table.max_order,
        exponent=calibration.exponent,
        again=calibration.again,
        noise=calibration.noise,
        rest=calibration.rest,
        rest_noise=calibration.rest_noise,
    )


def _token_tree(tree: library.DraftedTree) -> TokenTree:
    n = tree.num_nodes
    return TokenTree.sound(
        tuple(tree.token_ids[:n]), tuple(tree.parents[:n]), tuple(tree.log_probs[:n]), tuple(tree.masks[:n])
    )
