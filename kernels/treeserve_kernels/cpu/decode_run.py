"""Decode steps in a row in one native call: trees, forward pass, acceptance by replay, and again.

Where a pass takes a few milliseconds, an interpreter between two of them takes a good part of that. A run needs none:
drafters are called by address, nodes are chosen as the verifier's planner chooses them, tokens as its sampler does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from treeserve_kernels.cpu import library
from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.packing import Float32Array

_NO_HANDLE, _FAILED = -1, -1
_MOST_SOURCES = 32
_MOST_ROWS = 2**31 - 1


# Given a sequence's place in the run, its tokens in the run so far, and the logits after them (float32[outputs of the
# head], valid during the call): the next token, negative if there is none, and whether that ends the sequence. Raising
# says that there is none, too.
Choose = Callable[[int, Sequence[int], Float32Array], tuple[int, bool]]


@dataclass
class RunSequence:
    """A sequence of a run, which has nothing but its root to compute, or its prompt.

    Attributes:
        num_tokens: committed tokens, the root the last of them.
        root: the last committed token.
        tokens_left: that it may emit, at least 1.
        end_ids: tokens that end it.
        unread: committed tokens whose KV is missing, the root the last of them; empty for a root alone. Such a sequence
            emits one token when they are computed, which ends the run.
        asks: whether all its tokens are chosen by the caller, who says then which of them ends it.
        temperature: 0, or within `sampling.MIN_TEMPERATURE` and `MAX_TEMPERATURE`.
        seed: of the noise, [0, 2^64).
        handle: at the drafter; None: nothing is drafted for it.
        most_nodes: of a tree.
        slack_ms: until its next token is due; infinite if it was promised no time.
        token_ms: time per output token that it was promised.
        reserve_ms: by how much the last token may be late and the promise be kept.
        calibration: accepted over expected nodes, smoothed. The run goes on learning it.
        verified: nodes that a step with a tree verifies, smoothed. Likewise.
    """

    num_tokens: int
    root: int
    tokens_left: int
    end_ids: Sequence[int]
    unread: Sequence[int] = ()
    asks: bool = False
    temperature: float = 0.0
    seed: int = 0
    handle: int | None = None
    most_nodes: int = 0
    slack_ms: float = math.inf
    token_ms: float = math.inf
    reserve_ms: float = 0.0
    calibration: float = 1.0
    verified: float = 0.0


@dataclass(frozen=True)
class RunTerms:
    """What holds for a whole run.

    Attributes:
        vocab_size: token ids that exist; logits beyond are padding.
        step_rows: most rows of a step.
        unread_rows: most unread tokens that a step computes, those of the first sequences first. Draft nodes take the
            place of half of them at most.
        cost_table: expected milliseconds of a step by its rows, never falling.
        node_price: cost of verifying a draft node, in tokens; drafters are told.
        drafter: None for none.
        top_tokens: so many of the target's most probable tokens the drafter is told of, in place of each emitted one.
        max_steps: at least 1.
        max_s: no step begins later; the run may take a step longer.
        prior: calibration that fresh sequences begin with.
        stop: no further step begins once it is not 0.
    """

    vocab_size: int
    step_rows: int
    cost_table: dict[int, float]
    unread_rows: int = 0
    node_price: float = 0.0
    drafter: c.DrafterCalls | None = None
    top_tokens: int = 0
    max_steps: int = 1
    max_s: float = math.inf
    prior: float = 1.0
    stop: ctypes.c_int32 | None = None


class RunStep(NamedTuple):
    """How long a step and its forward pass took, and its rows.

    Attributes:
        prefill_rows: those without logits.
        attended: KV positions that such a row attends to, summed over all of them.
    """

    forward_ms: float
    step_ms: float
    rows: int
    prefill_rows: int
    attended: float


class RunRecord(NamedTuple):
    """What a step did to a sequence: draft nodes that were there, verified and accepted, and tokens emitted."""

    offered: int
    verified: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class RanSequence:
    """What a run did to a sequence.

    Attributes:
        token_ids: emitted; KV of all but the last, and of the root, is computed and committed.
        num_read: unread tokens whose KV is computed.
        has_ended: the last token ends it.
        has_failed: its next token could not be chosen.
        records: one for each step.
        calibration, verified: as learned.
    """

    token_ids: tuple[int, ...]
    num_read: int
    has_ended: bool
    has_failed: bool
    records: tuple[RunRecord, ...]
    calibration: float
    verified: float


@dataclass(frozen=True)
class Ran:
    """What a run did; possibly nothing.

    Attributes:
        sequences: in the order given.
        accepted_by_source: draft nodes accepted, by bit of their source masks.
        num_trees, num_empty_trees: drafted, and those of them with nothing but a root.
        draft_s: seconds spent on drafting.
        drafter_failed: a call to the drafter failed, and ended the run.
        prior: as learned.
        error: what ended the run: an argument out of range (ValueError; nothing was run), or a failed forward pass.
    """

    steps: tuple[RunStep, ...]
    sequences: tuple[RanSequence, ...]
    accepted_by_source: tuple[int, ...]
    num_trees: int
    num_empty_trees: int
    draft_s: float
    drafter_failed: bool
    prior: float
    error: Exception | None

    @classmethod
    def nothing(cls, sequences: Sequence[RunSequence], terms: RunTerms, error: Exception) -> Ran:
        """A run that could not begin."""
        ran = tuple(RanSequence((), 0, False, False, (), each.calibration, each.verified) for each in sequences)
        return cls((), ran, (), 0, 0, 0.0, False, terms.prior, error)


def run_decode(
    decoder: ctypes.c_void_p,
    kv: ctypes.c_void_p,
    num_outputs: int,
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    sequences: Sequence[RunSequence],
    terms: RunTerms,
    choose: Choose,
) -> Ran:
    """Run steps until one ends a sequence, there is no room for the next, or as the terms say.

    Args:
        decoder, kv: handles.
        num_outputs: of the decoder's head.
        block_size: that of the cache.
        block_tables: KV blocks of each sequence, those reserved included; the run ends where they do.
        choose: called where a sequence asks, and where logits are not finite or too near each other to tell.
    """
    described = [_filled(*each, block_size) for each in zip(sequences, block_tables, strict=True)]
    of_each = (c.RunSequence * len(sequences))(*described)
    steps = (c.RunStep * terms.max_steps)()
    records = (c.RunRecord * (terms.max_steps * len(sequences)))()
    by_source = (ctypes.c_int64 * _MOST_SOURCES)()
    stop = ctypes.c_int32() if terms.stop is None else terms.stop
    run = c.Run(
        num_sequences=len(sequences),
        sequences=of_each,
        costs=costs_of(terms.cost_table),
        vocab_size=terms.vocab_size,
        step_rows=terms.step_rows,
        unread_rows=terms.unread_rows,
        node_price=terms.node_price,
        choose=_calling(choose, num_outputs),
        drafter=None if terms.drafter is None else ctypes.pointer(terms.drafter),
        top_tokens=terms.top_tokens,
        max_steps=terms.max_steps,
        max_seconds=terms.max_s,
        stop=ctypes.pointer(stop),
        prior=terms.prior,
        steps=steps,
        records=records,
        accepted_by_source=by_source,
    )
    error: Exception | None = None
    try:
        library.check(library.load().ts_decode_run(decoder, kv, run))
    except (ValueError, MemoryError, RuntimeError) as raised:
        error = raised
    count = run.num_steps
    return Ran(
        tuple([RunStep(s.forward_ms, s.step_ms, s.rows, s.prefill_rows, s.attended) for s in steps[:count]]),
        tuple([_ran(each, records[i : count * len(sequences) : len(sequences)]) for i, each in enumerate(of_each)]),
        tuple(by_source),
        run.num_trees,
        run.num_empty_trees,
        run.draft_seconds,
        bool(run.drafter_failed),
        run.prior,
        error,
    )


def _calling(choose: Choose, num_outputs: int) -> Any:
    def call(sequence: int, token_ids: Any, count: int, logits: Any, has_ended: Any) -> int:
        try:
            token_id, has_ended[0] = choose(sequence, token_ids[:count], np.ctypeslib.as_array(logits, (num_outputs,)))
        except BaseException:  # which native code could not tell from a token
            return _FAILED
        return token_id

    return c.ChooseToken(call)


def costs_of(table: dict[int, float]) -> c.Costs:
    """A cost table as the library reads it."""
    rows = (ctypes.c_int32 * len(table))(*[min(rows, _MOST_ROWS) for rows in table])
    return c.Costs(len(table), rows, (ctypes.c_double * len(table))(*table.values()))


def _filled(sequence: RunSequence, table: Sequence[int], block_size: int) -> c.RunSequence:
    end_ids, unread = sequence.end_ids, sequence.unread
    most = min(sequence.tokens_left, len(table) * block_size)
    return c.RunSequence(
        block_table=(ctypes.c_int32 * len(table))(*table),
        end_ids=(ctypes.c_int32 * len(end_ids))(*end_ids),
        unread=(ctypes.c_int32 * len(unread))(*unread),
        num_blocks=len(table),
        num_end_ids=len(end_ids),
        num_unread=len(unread),
        asks=sequence.asks,
        num_tokens=sequence.num_tokens,
        root=sequence.root,
        tokens_left=sequence.tokens_left,
        most_nodes=sequence.most_nodes,
        temperature=sequence.temperature,
        seed=sequence.seed,
        handle=_NO_HANDLE if sequence.handle is None else sequence.handle,
        slack_ms=sequence.slack_ms,
        token_ms=sequence.token_ms,
        reserve_ms=sequence.reserve_ms,
        calibration=sequence.calibration,
        verified=sequence.verified,
        token_ids=(ctypes.c_int32 * max(most, 1))(),
    )


def _ran(sequence: c.RunSequence, records: Sequence[c.RunRecord]) -> RanSequence:
    return RanSequence(
        tuple(sequence.token_ids[: sequence.num_emitted]),
        sequence.num_read,
        bool(sequence.has_ended),
        bool(sequence.has_failed),
        tuple([RunRecord(r.offered, r.verified, r.accepted, r.emitted) for r in records]),
        sequence.calibration,
        sequence.verified,
    )
