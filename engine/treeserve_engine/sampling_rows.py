"""Lays out what a step's tokens are chosen by, for the sampling kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SamplerState
from treeserve_engine.upload import upload
from treeserve_kernels.next_token import NOT_SEEN, Penalties, SamplingRows


def sampling_rows(
    trees: Sequence[tuple[TokenTree, SamplerState]], vocab_size: int, device: torch.device
) -> SamplingRows:
    """All nodes of the sequences' trees as rows, one sequence after the other, in one copy to the device.

    Args:
        trees: each sequence's tree, and what its sampler knows at the root.
        vocab_size: ids to choose from.
    """
    states = [state for _, state in trees]
    params = [state.params for state in states]
    counts = [len(tree) for tree, _ in trees]
    first_rows = np.cumsum([0, *counts], dtype=np.int32)
    parents = [np.array(tree.parents, np.int32) for tree, _ in trees]
    penalties = [_penalty_list(tree, state) for tree, state in trees]
    biases = [(list(p.logit_bias), list(p.logit_bias.values())) for p in params]
    blocked = [state.blocked_ids if state.position < state.unblocked_from else () for state in states]

    def of_sequences(value: Callable[[SamplerState], Any], dtype: type) -> npt.NDArray[Any]:
        return np.array([value(state) for state in states], dtype)

    arrays: dict[str, npt.NDArray[Any]] = {
        "first_rows": first_rows,
        "sequences": np.repeat(np.arange(len(trees), dtype=np.int32), counts),
        "positions": _joined([s.position + np.array(t.depths, np.int64) for t, s in trees], np.int64),
        "token_ids": _joined([tree.token_ids for tree, _ in trees], np.int32),
        "parents": _joined(
            [np.where(p < 0, -1, p + first) for p, first in zip(parents, first_rows.tolist(), strict=False)], np.int32
        ),
        "temperatures": of_sequences(lambda s: s.params.temperature, np.float64),
        "top_ks": of_sequences(lambda s: s.params.top_k, np.int32),
        "top_ps": of_sequences(lambda s: s.params.top_p, np.float64),
        "min_p_gaps": of_sequences(lambda s: _min_p_gap(s.params), np.float64),
        "seeds": of_sequences(lambda s: s.params.seed, np.uint64).view(np.int64),
        "bias_offsets": _offsets([ids for ids, _ in biases]),
        "bias_ids": _joined([ids for ids, _ in biases], np.int32),
        "biases": _joined([values for _, values in biases], np.float64),
        "blocked_offsets": _offsets(blocked),
        "blocked_ids": _joined(blocked, np.int32),
        "unblocked_from": of_sequences(lambda s: s.unblocked_from, np.int64),
    }
    of_penalties = {
        "repetition": of_sequences(lambda s: s.params.repetition_penalty, np.float64),
        "presence": of_sequences(lambda s: s.params.presence_penalty, np.float64),
        "frequency": of_sequences(lambda s: s.params.frequency_penalty, np.float64),
        "offsets": _offsets([ids for ids, _ in penalties]),
        "ids": _joined([ids for ids, _ in penalties], np.int32),
        "counts": _joined([n for _, n in penalties], np.int32),
    }
    uploaded = upload([*arrays.values(), *of_penalties.values()], device)
    return SamplingRows(
        **dict(zip(arrays, uploaded, strict=False)),
        penalties=Penalties(*uploaded[len(arrays) :]),
        vocab_size=vocab_size,
        max_nodes=max(counts),
        max_path=max(max(tree.depths) for tree, _ in trees) + 1,
        edits=any(state.edits for state in states),
        filters=any(state.is_filtered for state in states),
        nuclei=any(not p.is_greedy and p.top_p < 1.0 for p in params),
    )


def _penalty_list(tree: TokenTree, state: SamplerState) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids and counts of a penalised sequence: its own, then what only its tree carries."""
    if not state.params.is_penalised:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ids, counts = state.context.counts()
    new = np.setdiff1d(np.array(tree.token_ids[1:], np.int64), ids)
    return np.concatenate([ids, new]), np.concatenate([counts, np.full(len(new), NOT_SEEN)])


def _min_p_gap(params: SamplingParams) -> float:
    return params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def _offsets(lists: Sequence[Sequence[Any] | npt.NDArray[Any]]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int32)


def _joined(parts: Sequence[Sequence[Any] | npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype) for part in parts])
