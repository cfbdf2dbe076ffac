"""Top-k, top-p and min-p of a row of logits as one border, as a Triton kernel.

All three filters keep a prefix of the same order (logit down, id up), so each row has one border: every token above a
key, and those at the key up to an id. The border is found by searching the key's bits, most significant first: how
much lies at or above each of eight candidate keys is summed over the row, where a token counts 1 for top-k and its
fixed-point weight for top-p. Integer sums are exact in any order, so the result has the bits of the torch twin.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from treeserve_kernels.triton.noise import order_key

# Ids that a program, one for each row, takes at once.
TILE = 1024
OPTIONS: dict[str, int | bool] = {"num_warps": 8, "enable_fp_fusion": False}

_DIGIT_BITS = tl.constexpr(3)
_DIGITS = tl.constexpr(8)
_TOP_SHIFT = tl.constexpr(30)  # of the first digit: eleven digits hold a key's 32 bits


@triton.jit
def row_best(bests, row, num_chunks, num_chunks_block: tl.constexpr):
    """The largest logit of a row, from those of its chunks."""
    parts = tl.arange(0, num_chunks_block)
    return tl.max(tl.load(bests + row * num_chunks + parts, mask=parts < num_chunks, other=float("-inf")), 0)


@triton.jit
def _load_keys_masses(values_ptr, masses_ptr, ids, vocab_size, weighed: tl.constexpr):
    """Keys of a tile of ids and what each token counts: its mass, or 1. Past the vocabulary: below all keys, 0."""
    exists = ids < vocab_size
    keys = tl.where(exists, order_key(tl.load(values_ptr + ids, mask=exists, other=0.0)), -1)
    if weighed:
        return keys, tl.load(masses_ptr + ids, mask=exists, other=0)
    else:
        return keys, exists.to(tl.int64)


@triton.jit
def _find_border(values_ptr, masses_ptr, vocab_size, target, weighed: tl.constexpr, tile: tl.constexpr):
    """The largest key at or above which the tokens of a row count at least `target`."""
    border = tl.zeros([], tl.int64)
    digits = tl.arange(0, _DIGITS).to(tl.int64)
    shift = _TOP_SHIFT + 0
    while shift >= 0:
        candidates = border + (digits << shift)
        sums = tl.zeros([_DIGITS, tile], tl.int64)
        for start in range(0, vocab_size, tile):
            ids = start + tl.arange(0, tile)
            keys, counts = _load_keys_masses(values_ptr, masses_ptr, ids, vocab_size, weighed)
            sums += tl.where(keys[None, :] >= candidates[:, None], counts[None, :], 0)
        border += (tl.sum((tl.sum(sums, 1) >= target).to(tl.int64), 0) - 1) << shift
        shift -= _DIGIT_BITS
    return border


@triton.jit
def _around_border(values_ptr, masses_ptr, vocab_size, border, weighed: tl.constexpr, tile: tl.constexpr):
    """What the tokens above a border count, those at it, and how many lie at it."""
    above = tl.zeros([tile], tl.int64)
    at = tl.zeros([tile], tl.int64)
    num_at = tl.zeros([tile], tl.int64)
    for start in range(0, vocab_size, tile):
        keys, counts = _load_keys_masses(values_ptr, masses_ptr, start + tl.arange(0, tile), vocab_size, weighed)
        above += tl.where(keys > border, counts, 0)
        at += tl.where(keys == border, counts, 0)
        num_at += (keys == border).to(tl.int64)
    return tl.sum(above, 0), tl.sum(at, 0), tl.sum(num_at, 0)


@triton.jit
def _find_cut(values_ptr, vocab_size, border, num_kept, tile: tl.constexpr):
    """The id up to which `num_kept` tokens at the border are kept."""
    before = tl.zeros([], tl.int64)
    cut = tl.zeros([], tl.int32) - 1
    for start in range(0, vocab_size, tile):
        ids = start + tl.arange(0, tile)
        keys, _ = _load_keys_masses(values_ptr, values_ptr, ids, vocab_size, False)
        is_at = (keys == border).to(tl.int64)
        kept = (is_at > 0) & (before + tl.cumsum(is_at, 0) <= num_kept)
        cut = tl.maximum(cut, tl.max(tl.where(kept, ids, -1), 0))
        before += tl.sum(is_at, 0)
    return cut


@triton.jit
def filter_kernel(
    logits, stride, vocab_size, sequences, temperatures, top_ks, top_ps, min_p_gaps, bests, masses, borders, cuts,
    num_chunks, tile: tl.constexpr, num_chunks_block: tl.constexpr,
):  # fmt: skip
    """Border key and last id at it that a row's filters leave: int64[K] and int32[K]."""
    row = tl.program_id(0)
    sequence = tl.load(sequences + row)
    temperature = tl.load(temperatures + sequence)
    top_k = tl.load(top_ks + sequence)
    top_p = tl.load(top_ps + sequence)
    gap = tl.load(min_p_gaps + sequence)
    border = tl.zeros([], tl.int64)
    num_kept = tl.zeros([], tl.int64) + vocab_size
    values_ptr = logits + row.to(tl.int64) * stride
    masses_ptr = masses + row.to(tl.int64) * vocab_size
    if temperature > 0.0:
        if (top_k > 0) & (top_k < vocab_size):
            border = _find_border(values_ptr, masses_ptr, vocab_size, top_k, False, tile)
            above, _, _ = _around_border(values_ptr, masses_ptr, vocab_size, border, False, tile)
            num_kept = top_k - above
        if top_p < 1.0:
            above, at, num_at = _around_border(values_ptr, masses_ptr, vocab_size, border, True, tile)
            # Tokens of one key have one mass. Nothing lies at the lowest border, of rows without a top-k.
            total = above + at // tl.maximum(num_at, 1) * tl.minimum(num_kept, num_at)
            target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(tl.maximum(target, 1), total)
            border = _find_border(values_ptr, masses_ptr, vocab_size, target, True, tile)
            above, at, num_at = _around_border(values_ptr, masses_ptr, vocab_size, border, True, tile)
            one = at // num_at
            num_kept = (target - above + one - 1) // one
        best = row_best(bests, row, num_chunks, num_chunks_block).to(tl.float64)
        least = order_key((best + gap).to(tl.float32))
        if least > border:
            border = least
            num_kept = tl.zeros([], tl.int64) + vocab_size
    tl.store(borders + row, border)
    tl.store(cuts + row, _find_cut(values_ptr, vocab_size, border, num_kept, tile))
