"""Choosing the tokens of many rows of logits, and walking trees along them, in plain torch: the meaning of the kernels.

A row is a node of a sequence's token tree. Its token is what plain decoding would choose after the node's path, by
the rules of the engine's `next_token`: penalties, bias and blocked ids; at temperature 0 the argmax, else top-k, top-p,
min-p and the argmax of scaled logit plus noise; ties go to the lowest id. One thing is computed in another way: top-p
sums weights in fixed point, which is exact in any order. So the nucleus differs from one summed in float64 only where
the weights of a prefix come within 2^-41 * vocab_size of top_p of all, in units of the most probable token's weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from treeserve_kernels.noise import gumbel, mass, order_key

MAX_VOCAB_SIZE = 2**20  # masses of more could overflow
# Stands for a token where the logits are not finite.
NO_TOKEN = -1
# Count of an id that is in a sequence's penalty list only because its tree carries it.
NOT_SEEN = -1


@dataclass(frozen=True)
class Penalties:
    """Tokens that penalties look at. Sequence s owns the entries offsets[s]:offsets[s + 1].

    Attributes:
        repetition, presence, frequency: float64[S].
        offsets: int32[S + 1].
        ids: int32[N], distinct within a sequence: those of prompt and output, and of the tree.
        counts: int32[N], times generated; NOT_SEEN if only the tree has the id.
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    offsets: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class SamplingRows:
    """How the tokens of K rows are chosen; the rows of a sequence are consecutive and start with its tree's root.

    Attributes:
        first_rows: int32[S + 1]; the rows of sequence s are first_rows[s]:first_rows[s + 1].
        sequences: int32[K], the sequence of each row.
        positions: int64[K], output position of the token to choose.
        token_ids: int32[K], the token that the row's node carries.
        parents: int32[K], row of the node's parent; -1 for a root.
        temperatures: float64[S]; 0 is greedy.
        top_ks: int32[S]; 0 for no limit.
        top_ps: float64[S]; 1 for no limit.
        min_p_gaps: float64[S], temperature * log(min_p); -inf for no limit.
        seeds: int64[S], the unsigned seeds' bits.
        penalties: which tokens are penalised, and how.
        bias_offsets, bias_ids, biases: int32[S + 1], int32[N], float64[N].
        blocked_offsets, blocked_ids: int32[S + 1], int32[N], distinct within a sequence.
        unblocked_from: int64[S], first position at which a sequence's blocked ids may be chosen.
        vocab_size: columns to choose from; the others are padding.
        max_nodes: rows of the longest sequence.
        max_path: nodes of the longest path from a root.
        edits: whether any penalty, bias or blocked id applies.
        filters: whether any sampled sequence has a top-k, top-p or min-p.
        nuclei: whether any sampled sequence has a top-p.
    """

    first_rows: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    parents: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_p_gaps: torch.Tensor
    seeds: torch.Tensor
    penalties: Penalties
    bias_offsets: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor
    blocked_offsets: torch.Tensor
    blocked_ids: torch.Tensor
    unblocked_from: torch.Tensor
    vocab_size: int
    max_nodes: int
    max_path: int
    edits: bool
    filters: bool
    nuclei: bool


def choose_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The token of each row.

    Args:
        logits: float32[K, at least vocab_size], left unchanged.
        rows: how each is chosen.

    Returns:
        int32[K]; NO_TOKEN where a logit is not finite.
    """
    tokens = [_token(logits[row, : rows.vocab_size], rows, row) for row in range(len(rows.sequences))]
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def walk_trees(tokens: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Follow each tree from its root to the child that carries the chosen token, until there is none.

    Args:
        tokens: int32[K] of `choose_tokens`.

    Returns:
        int32[S, 2, max_path]: the chosen token of each node walked, and the child it led to, counted from the root;
        -1 for no child, and after the end.
    """
    out = torch.full((len(rows.first_rows) - 1, 2, rows.max_path), -1, dtype=torch.int32)
    chosen, carried, parents = tokens.tolist(), rows.token_ids.tolist(), rows.parents.tolist()
    for sequence, (first, last) in enumerate(pairwise(rows.first_rows.tolist())):
        row: int | None = first if first < last else None
        step = 0
        while row is not None:
            token, parent = chosen[row], row
            row = next((c for c in range(first, last) if parents[c] == parent and carried[c] == token), None)
            out[sequence, 0, step] = token
            out[sequence, 1, step] = -1 if row is None else row - first
            step += 1
    return out.to(tokens.device)


def _token(logits: torch.Tensor, rows: SamplingRows, row: int) -> int:
    if not bool(logits.isfinite().all()):
        return NO_TOKEN
    sequence = int(rows.sequences[row])
    values = _edited(logits, rows, row, sequence)
    scores = values.double()
    temperature = float(rows.temperatures[sequence])
    if temperature > 0.0:
        ids = torch.arange(rows.vocab_size, device=values.device)
        scaled = (scores - scores.max()) / temperature
        scores = scaled + gumbel(int(rows.seeds[sequence]), int(rows.positions[row]), ids)
        scores[~_kept(values, scaled, rows, sequence)] = -math.inf
    return int((scores == scores.max()).nonzero()[0])


def _edited(logits: torch.Tensor, rows: SamplingRows, row: int, sequence: int) -> torch.Tensor:
    """The logits after penalties, bias and blocked ids, in double precision and saturated to float32."""
    values = logits.clone()
    p = rows.penalties
    own = slice(*p.offsets[sequence : sequence + 2].tolist())
    ids, counts = p.ids[own].long(), p.counts[own].long()
    path = _path(rows, row)
    on_path = (ids[:, None] == path).sum(1)
    seen = (counts >= 0) | (on_path > 0)
    ids, counts = ids[seen], (counts.clamp(min=0) + on_path)[seen].double()
    penalised = values[ids].double()
    repetition = p.repetition[sequence]
    penalised = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised -= p.presence[sequence] * (counts > 0) + p.frequency[sequence] * counts
    values[ids] = _saturated(penalised)
    own = slice(*rows.bias_offsets[sequence : sequence + 2].tolist())
    ids = rows.bias_ids[own].long()
    values[ids] = _saturated(values[ids].double() + rows.biases[own])
    if rows.positions[row] < rows.unblocked_from[sequence]:
        own = slice(*rows.blocked_offsets[sequence : sequence + 2].tolist())
        values[rows.blocked_ids[own].long()] = -math.inf
    return values


def _path(rows: SamplingRows, row: int) -> torch.Tensor:
    """Tokens of the nodes from the root's child to the row's own node, last first. The root's is in the counts."""
    tokens: list[int] = []
    while (parent := int(rows.parents[row])) >= 0:
        tokens.append(int(rows.token_ids[row]))
        row = parent
    return torch.tensor(tokens, dtype=torch.int64, device=rows.parents.device)


def _saturated(values: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float32).max
    return values.clamp(-limit, limit).float()


def _kept(values: torch.Tensor, scaled: torch.Tensor, rows: SamplingRows, sequence: int) -> torch.Tensor:
    """Mask of the tokens that pass top-k, top-p and min-p."""
    keys = order_key(values)
    order = torch.sort(keys, descending=True, stable=True).indices  # ties: lowest id first
    size = int(rows.top_ks[sequence]) or len(order)
    if (top_p := float(rows.top_ps[sequence])) < 1.0:
        masses = mass(scaled[order[:size]]).cumsum(0)
        size = int((masses < mass_target(int(masses[-1]), top_p)).sum()) + 1
    kept = torch.zeros_like(keys, dtype=torch.bool)
    kept[order[:size]] = True
    least = (values.max().double() + rows.min_p_gaps[sequence]).float()
    return kept & (keys >= order_key(least))


def mass_target(total: int, top_p: float) -> int:
    """The mass that a nucleus must reach: top_p of the total, at least the smallest there is."""
    return min(max(math.ceil(top_p * float(total)), 1), total)
