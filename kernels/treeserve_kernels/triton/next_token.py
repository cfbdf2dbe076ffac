"""Choosing the tokens of many rows of logits as Triton kernels: edit, scan, filter, score, pick.

Rows are cut into chunks of the vocabulary that run side by side: `scan` finds each chunk's best logit, `score` its
best token (logit plus noise), `pick` the best of a row's chunks. Only what a batch needs is launched: `edit` applies
penalties, bias and blocked ids to a copy of the logits, and `filter` turns top-k, top-p and min-p into one border
(see `treeserve_kernels.triton.border`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from treeserve_kernels.next_token import MAX_VOCAB_SIZE, SamplingRows
from treeserve_kernels.triton import border
from treeserve_kernels.triton.border import filter_kernel, row_best
from treeserve_kernels.triton.noise import gumbel, mass, order_key

# Ids of a row that one program of scan, weigh and score takes.
CHUNK = 1024
# Entries of a list of ids that edit takes at once.
EDIT_TILE = 128
# What the kernels are compiled with: the noise must not be contracted.
OPTIONS: dict[str, int | bool] = {"num_warps": 4, "enable_fp_fusion": False}

_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _saturated(values):
    return tl.minimum(tl.maximum(values, -_FLOAT32_MAX), _FLOAT32_MAX).to(tl.float32)


@triton.jit
def _is_finite(values):
    return tl.abs(values) < float("inf")


@triton.jit
def edit_kernel(
    logits, stride, sequences, positions, token_ids, parents,
    repetition, presence, frequency, penalty_offsets, penalty_ids, penalty_counts,
    bias_offsets, bias_ids, biases, blocked_offsets, blocked_ids, unblocked_from, num_blocked,
    tile: tl.constexpr,
):  # fmt: skip
    """Applies a row's penalties, bias and blocked ids to its logits in place.

    num_blocked[row] becomes the number of logits set to -inf, or -1 if any logit that was overwritten was not finite.
    The three steps may meet in one logit: barriers keep them in order.
    """
    row = tl.program_id(0)
    sequence = tl.load(sequences + row)
    values_ptr = logits + row.to(tl.int64) * stride
    lanes = tl.arange(0, tile)
    broken = tl.zeros([tile], tl.int32)

    times = tl.load(repetition + sequence)
    once = tl.load(presence + sequence)
    each = tl.load(frequency + sequence)
    end = tl.load(penalty_offsets + sequence + 1)
    for start in range(tl.load(penalty_offsets + sequence), end, tile):
        exists = start + lanes < end
        ids = tl.load(penalty_ids + start + lanes, mask=exists, other=0)
        listed = tl.load(penalty_counts + start + lanes, mask=exists, other=0)
        counts = tl.maximum(listed, 0)
        node = row
        parent = tl.load(parents + node)
        while parent >= 0:
            counts += (ids == tl.load(token_ids + node)).to(tl.int32)
            node = parent
            parent = tl.load(parents + node)
        penalised = exists & ((listed >= 0) | (counts > 0))
        values = tl.load(values_ptr + ids, mask=penalised, other=0.0)
        broken += (penalised & ~_is_finite(values)).to(tl.int32)
        seen = values.to(tl.float64)
        seen = tl.where(seen > 0.0, seen / times, seen * times)
        generated = counts.to(tl.float64)
        seen -= once * (counts > 0).to(tl.float64) + each * generated
        tl.store(values_ptr + ids, _saturated(seen), mask=penalised)
    tl.debug_barrier()

    end = tl.load(bias_offsets + sequence + 1)
    for start in range(tl.load(bias_offsets + sequence), end, tile):
        exists = start + lanes < end
        ids = tl.load(bias_ids + start + lanes, mask=exists, other=0)
        values = tl.load(values_ptr + ids, mask=exists, other=0.0)
        broken += (exists & ~_is_finite(values)).to(tl.int32)
        biased = values.to(tl.float64) + tl.load(biases + start + lanes, mask=exists, other=0.0)
        tl.store(values_ptr + ids, _saturated(biased), mask=exists)
    tl.debug_barrier()

    first = tl.load(blocked_offsets + sequence)
    end = tl.load(blocked_offsets + sequence + 1)
    end = tl.where(tl.load(positions + row) < tl.load(unblocked_from + sequence), end, first)
    for start in range(first, end, tile):
        exists = start + lanes < end
        ids = tl.load(blocked_ids + start + lanes, mask=exists, other=0)
        values = tl.load(values_ptr + ids, mask=exists, other=0.0)
        broken += (exists & ~_is_finite(values)).to(tl.int32)
        tl.store(values_ptr + ids, float("-inf"), mask=exists)
    tl.store(num_blocked + row, tl.where(tl.sum(broken, 0) > 0, -1, end - first))


@triton.jit
def scan_kernel(logits, stride, vocab_size, bests, num_unusable, num_chunks, chunk: tl.constexpr):
    """Largest logit of a chunk and how many of its logits are not finite: [K, chunks] each."""
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * chunk + tl.arange(0, chunk)
    exists = ids < vocab_size
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=exists, other=float("-inf"))
    tl.store(bests + row * num_chunks + part, tl.max(values, 0))
    tl.store(num_unusable + row * num_chunks + part, tl.sum((exists & ~_is_finite(values)).to(tl.int32), 0))


@triton.jit
def weigh_kernel(
    logits, stride, vocab_size, sequences, temperatures, top_ps, bests, masses, num_chunks,
    chunk: tl.constexpr, num_chunks_block: tl.constexpr,
):  # fmt: skip
    """Masses int64 [K, vocab_size] of a chunk's tokens, for the rows that have a top-p."""
    row, part = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + row)
    temperature = tl.load(temperatures + sequence)
    if (temperature == 0.0) | (tl.load(top_ps + sequence) >= 1.0):
        return
    best = row_best(bests, row, num_chunks, num_chunks_block).to(tl.float64)
    ids = part * chunk + tl.arange(0, chunk)
    exists = ids < vocab_size
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=exists, other=float("-inf"))
    scaled = (values.to(tl.float64) - best) / temperature
    tl.store(masses + row.to(tl.int64) * vocab_size + ids, mass(scaled), mask=exists)


@triton.jit
def score_kernel(
    logits, stride, vocab_size, sequences, positions, temperatures, seeds, bests, borders, cuts,
    scores_ptr, ids_ptr, num_chunks, filtered: tl.constexpr, chunk: tl.constexpr, num_chunks_block: tl.constexpr,
):  # fmt: skip
    """Best score of a chunk and the lowest id that has it: [K, chunks] each."""
    row, part = tl.program_id(0), tl.program_id(1)
    out = row * num_chunks + part
    sequence = tl.load(sequences + row)
    ids = part * chunk + tl.arange(0, chunk)
    exists = ids < vocab_size
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=exists, other=float("-inf"))
    scores = values.to(tl.float64)
    temperature = tl.load(temperatures + sequence)
    if temperature > 0.0:
        kept = exists
        if filtered:
            border = tl.load(borders + row)
            keys = order_key(values)
            kept = exists & ((keys > border) | ((keys == border) & (ids <= tl.load(cuts + row))))
        if tl.sum(kept.to(tl.int32), 0) == 0:
            scores = tl.full([chunk], float("-inf"), tl.float64)
        else:
            best = row_best(bests, row, num_chunks, num_chunks_block).to(tl.float64)
            noise = gumbel(tl.load(seeds + sequence), tl.load(positions + row), ids)
            scores = tl.where(kept, (scores - best) / temperature + noise, float("-inf"))
    top = tl.max(scores, 0)
    tl.store(scores_ptr + out, top)
    tl.store(ids_ptr + out, tl.min(tl.where(scores == top, ids, _NO_ID), 0))


@triton.jit
def pick_kernel(
    scores_ptr, ids_ptr, num_unusable, num_blocked, tokens, num_chunks,
    edited: tl.constexpr, num_chunks_block: tl.constexpr,
):  # fmt: skip
    """The id with a row's best score, the lowest on ties; -1 if a logit was not finite before it was edited."""
    row = tl.program_id(0)
    parts = tl.arange(0, num_chunks_block)
    mask = parts < num_chunks
    scores = tl.load(scores_ptr + row * num_chunks + parts, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_chunks + parts, mask=mask, other=_NO_ID)
    unusable = tl.sum(tl.load(num_unusable + row * num_chunks + parts, mask=mask, other=0), 0)
    expected = 0
    if edited:
        expected = tl.load(num_blocked + row)
    token = tl.min(tl.where(scores == tl.max(scores, 0), ids, _NO_ID), 0)
    tl.store(tokens + row, tl.where(unusable == expected, token, -1))


@dataclass(frozen=True)
class SamplingPlan:
    """Which kernels one call launches, from host-known sizes alone: no tensor is read back."""

    num_rows: int
    num_chunks: int
    kernels: tuple[str, ...]

    @classmethod
    def of(cls, rows: SamplingRows) -> Self:
        """What these rows need."""
        optional = {"edit": rows.edits, "weigh": rows.nuclei, "filter": rows.filters}
        kernels = ("edit", "scan", "weigh", "filter", "score", "pick")
        return cls(
            len(rows.sequences),
            triton.cdiv(rows.vocab_size, CHUNK),
            tuple(k for k in kernels if optional.get(k, True)),
        )


def choose_tokens_triton(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The token of each row, as `treeserve_kernels.next_token.choose_tokens` has it; never waits for the device.

    Args:
        logits: float32[K, at least vocab_size], rows contiguous, left unchanged.
        rows: how each is chosen, on the device of `logits`.

    Returns:
        int32[K]. Editing takes a copy of the logits, top-p a workspace of 8 K vocab_size bytes.

    Raises:
        ValueError: on shapes or dtypes the kernels do not take.
    """
    _check(logits, rows)
    plan = SamplingPlan.of(rows)
    k, chunks, vocab_size = plan.num_rows, plan.num_chunks, rows.vocab_size
    tokens = logits.new_empty(k, dtype=torch.int32)
    if k == 0:
        return tokens
    block = triton.next_power_of_2(chunks)
    num_blocked = logits.new_empty(k, dtype=torch.int32)
    if "edit" in plan.kernels:
        logits = logits.clone(memory_format=torch.contiguous_format)
        p = rows.penalties
        edit_kernel[(k,)](
            logits, logits.stride(0), rows.sequences, rows.positions, rows.token_ids, rows.parents,
            p.repetition, p.presence, p.frequency, p.offsets, p.ids, p.counts,
            rows.bias_offsets, rows.bias_ids, rows.biases,
            rows.blocked_offsets, rows.blocked_ids, rows.unblocked_from, num_blocked,
            EDIT_TILE, **OPTIONS,
        )  # fmt: skip
    of_logits = (logits, logits.stride(0), vocab_size)
    bests = logits.new_empty((k, chunks))
    num_unusable = logits.new_empty((k, chunks), dtype=torch.int32)
    scan_kernel[(k, chunks)](*of_logits, bests, num_unusable, chunks, CHUNK, **OPTIONS)
    masses = logits.new_empty((k, vocab_size) if rows.nuclei else (1,), dtype=torch.int64)
    if "weigh" in plan.kernels:
        weigh_kernel[(k, chunks)](
            *of_logits, rows.sequences, rows.temperatures, rows.top_ps, bests, masses, chunks, CHUNK, block, **OPTIONS
        )
    borders = logits.new_empty(k, dtype=torch.int64)
    cuts = logits.new_empty(k, dtype=torch.int32)
    if "filter" in plan.kernels:
        filter_kernel[(k,)](
            *of_logits, rows.sequences, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_p_gaps,
            bests, masses, borders, cuts, chunks, border.TILE, block, **border.OPTIONS,
        )  # fmt: skip
    scores = logits.new_empty((k, chunks), dtype=torch.float64)
    ids = logits.new_empty((k, chunks), dtype=torch.int32)
    score_kernel[(k, chunks)](
        *of_logits, rows.sequences, rows.positions, rows.temperatures, rows.seeds, bests, borders, cuts,
        scores, ids, chunks, rows.filters, CHUNK, block, **OPTIONS,
    )  # fmt: skip
    pick_kernel[(k,)](scores, ids, num_unusable, num_blocked, tokens, chunks, rows.edits, block, **OPTIONS)
    return tokens


def _check(logits: torch.Tensor, rows: SamplingRows) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows, not {logits.dtype} {tuple(logits.shape)}")
    if len(logits) != len(rows.sequences) or not 0 < rows.vocab_size <= min(logits.shape[1], MAX_VOCAB_SIZE):
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit {len(rows.sequences)} rows of {rows.vocab_size} tokens "
            f"(at most {MAX_VOCAB_SIZE})"
        )
