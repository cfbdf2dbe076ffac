"""Replay acceptance on the device that holds the logits: the host waits once per step, for a few integers.

The tokens of all nodes are chosen in one pass and each tree is walked on the device. The host then appends the walked
tokens to the sampler, which cuts them where the generation ends: it must see every token anyway, for its counts and
for stop strings. What is emitted is what `accept` would emit under replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from treeserve_core.outcome import PositionLogProbs, VerifyOutcome
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.next_token import NonFiniteLogitsError
from treeserve_engine.sampling_rows import sampling_rows
from treeserve_kernels.dispatch import Kernels, kernels_for


@dataclass(frozen=True)
class TreeToAccept:
    """One sequence's tree, and its sampler, which its commit advances.

    Attributes:
        should_stop: told each emitted token once, in order; True if it completes a stop string.
        num_top: most probable tokens wanted for each emitted one.
    """

    tree: TokenTree
    sampler: SequenceSampler
    should_stop: Callable[[int], bool] | None = None
    num_top: int = 0


# Commits a tree's walked tokens: its outcome, and for each token the most probable ones in its place, best first.
Commit = Callable[[], tuple[VerifyOutcome, tuple[Sequence[int], ...]]]


def accept_on_device(
    logits: torch.Tensor, trees: Sequence[TreeToAccept], vocab_size: int, kernels: Kernels | None = None
) -> list[Commit]:
    """Choose and walk the tokens of a step's trees.

    Args:
        logits: float32[all nodes, at least vocab_size], the trees' nodes one tree after the other.
        trees: at least one, each growing from its sampler's last token.
        vocab_size: ids to choose from.
        kernels: by default those for the device of `logits`.

    Returns:
        For each tree its commit, to be called once while `logits` are valid. It raises what `accept` would.
    """
    kernels = kernels or kernels_for(logits.device)
    rows = sampling_rows([(t.tree, t.sampler.state) for t in trees], vocab_size, logits.device)
    walked = kernels.walk_trees(kernels.choose_tokens(logits, rows), rows)
    num_top = max(t.num_top for t in trees)
    results = [walked.reshape(len(trees), -1)]
    if num_top:
        top = logits[:, :vocab_size].index_select(0, _walked_rows(walked, rows.first_rows)).topk(num_top).indices
        results.append(top.int().view(len(trees), -1))
    on_host = torch.cat(results, 1).cpu().numpy()  # the step's one wait, unless log-probabilities are wanted
    size = walked[0].numel()
    starts = np.cumsum([0, *(len(t.tree) for t in trees)]).tolist()
    return [
        partial(_commit, tree, host[:size].reshape(2, -1), host[size:].reshape(-1, num_top or 1), logits, start)
        for tree, host, start in zip(trees, on_host, starts, strict=False)
    ]


def _walked_rows(walked: torch.Tensor, first_rows: torch.Tensor) -> torch.Tensor:
    """Row of logits that chose each walked token, the root's after the end: int64[S * max_path]."""
    children = walked[:, 1, :-1].clamp(min=0)
    nodes = torch.cat((torch.zeros_like(walked[:, 1, :1]), children), 1)
    return (nodes + first_rows[:-1, None]).reshape(-1).long()


def _commit(
    tree: TreeToAccept,
    walked: npt.NDArray[np.int32],
    top: npt.NDArray[np.int32],
    logits: torch.Tensor,
    first_row: int,
) -> tuple[VerifyOutcome, tuple[tuple[int, ...], ...]]:
    """Append the walked tokens to the sampler as `accept` does."""
    sampler = tree.sampler
    if tree.tree.token_ids[0] != sampler.last_token_id:
        raise ValueError(f"the root is {tree.tree.token_ids[0]}, the last committed token {sampler.last_token_id}")
    tokens, children = walked.tolist()
    num_walked = next((i + 1 for i, child in enumerate(children) if child < 0), len(children))
    log_probs_of = _log_probs_of(sampler, logits, first_row, [0, *children[: num_walked - 1]])
    accepted: list[int] = []
    emitted: list[int] = []
    log_probs: list[PositionLogProbs] = []
    for step, (token_id, child) in enumerate(zip(tokens[:num_walked], children, strict=False)):
        if token_id < 0:
            raise NonFiniteLogitsError("the model gave logits that are not finite")
        if log_probs_of is not None:
            log_probs.append(log_probs_of(step, token_id))
        sampler.append(token_id, stopped=tree.should_stop is not None and tree.should_stop(token_id))
        emitted.append(token_id)
        if child >= 0:
            accepted.append(child)
        if sampler.finish_reason is not None:
            break
    outcome = VerifyOutcome(tuple(accepted), tuple(emitted), sampler.finish_reason, tuple(log_probs))
    wanted = top[: len(emitted), : tree.num_top].tolist() if tree.num_top else ()
    return outcome, tuple(map(tuple, wanted))


def _log_probs_of(
    sampler: SequenceSampler, logits: torch.Tensor, first_row: int, nodes: Sequence[int]
) -> Callable[[int, int], PositionLogProbs] | None:
    """Log-probabilities at each step of a walk over `nodes`, from one copy of their logits; None if not wanted."""
    if not sampler.wants_log_probs:
        return None
    index = torch.tensor([first_row + node for node in nodes], device=logits.device)
    rows: npt.NDArray[np.float32] = logits.index_select(0, index).cpu().numpy()
    return lambda step, token_id: sampler.log_probs(rows[step], token_id)
