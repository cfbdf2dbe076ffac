"""Logit processors: penalties, bias and what may not be chosen, applied to a row of logits before the choice."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from treeserve_core.sampling import SamplingParams

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class TokenContext:
    """The distinct tokens a sequence has seen and how often each was generated: all that penalties look at.

    It only grows. A walk needs no more: every token it takes is emitted. Looking ahead takes a copy (`followed_by`).
    """

    def __init__(self, prompt_token_ids: Iterable[int] = (), output_token_ids: Iterable[int] = ()) -> None:
        distinct = dict.fromkeys(prompt_token_ids)
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = array("q", distinct)
        self._output_counts = array("q", bytes(8 * len(distinct)))
        for token_id in output_token_ids:
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token_id, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token_id)
            self._output_counts.append(0)
        self._output_counts[slot] += 1

    def followed_by(self, token_ids: Iterable[int]) -> TokenContext:
        """A copy in which these tokens were generated too."""
        longer = TokenContext()
        longer._slots, longer._ids, longer._output_counts = self._slots.copy(), self._ids[:], self._output_counts[:]
        for token_id in token_ids:
            longer.push(token_id)
        return longer

    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct ids of prompt and output, and how often each occurs in the output: int64[n] twice."""
        return np.array(self._ids, dtype=np.int64), np.array(self._output_counts, dtype=np.int64)


def processed_logits(
    logits: FloatArray,
    params: SamplingParams,
    context: TokenContext,
    blocked_ids: Sequence[int] = (),
    allowed: BoolArray | None = None,
) -> FloatArray:
    """The logits a token is chosen from, before temperature and filters.

    In this order: repetition penalty (prompt and output), presence and frequency penalties (output), logit bias,
    blocked ids and all that are not allowed (to -inf). A penalty so extreme that it leaves float32 saturates at its
    largest finite value.

    Args:
        logits: float32[vocab_size], left unchanged.
        allowed: bool[vocab_size], ids that alone may be chosen; None for all.

    Returns:
        float32[vocab_size]: `logits` itself if nothing applies, else a copy.
    """
    if not (params.is_penalised or params.logit_bias or blocked_ids or allowed is not None):
        return logits
    logits = logits.copy()
    if params.is_penalised:
        _apply_penalties(logits, params, context)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        bias = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        logits[ids] = _saturated(logits[ids] + bias)
    if blocked_ids:
        logits[list(blocked_ids)] = -np.inf
    if allowed is not None:
        logits[~allowed] = -np.inf
    return logits


def _apply_penalties(logits: FloatArray, params: SamplingParams, context: TokenContext) -> None:
    """Penalise seen tokens in place."""
    ids, output_counts = context.counts()
    seen = logits[ids].astype(np.float64)
    if params.repetition_penalty != 1.0:
        with np.errstate(over="ignore"):  # saturated below
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    seen -= params.presence_penalty * (output_counts > 0) + params.frequency_penalty * output_counts
    logits[ids] = _saturated(seen)


def _saturated(values: npt.NDArray[np.float64]) -> FloatArray:
    return np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
