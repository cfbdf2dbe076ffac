"""A step's forward pass and acceptance where the logits stay on the device that computed them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from treeserve_engine.accept import is_replayed
from treeserve_engine.batch import SequenceRows
from treeserve_engine.device_accept import Commit, TreeToAccept, accept_on_device
from treeserve_engine.interface import DeviceModel
from treeserve_engine.runner import ModelRunner
from treeserve_verifier.executor import Accepted
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import PlannedSequence

AcceptOnHost = Callable[[PlannedSequence, npt.NDArray[np.float32]], Accepted]


def forward_on_device(
    runner: ModelRunner,
    model: DeviceModel,
    planned: SequenceOf[PlannedSequence],
    rows: SequenceOf[SequenceRows],
    accept_on_host: AcceptOnHost,
    *,
    top_tokens: int,
    top_tokens_for: Collection[int],
    vocab_size: int,
) -> list[Commit]:
    """Compute a step's rows and replay its trees; for each sequence what gives its outcome, or raises its error.

    Args:
        model: the runner's.
        accept_on_host: accepts a tree from its logits on the host, by rules and grammars that the device does not know.
        top_tokens: most probable tokens for each emitted one, of the sequences `top_tokens_for`.
    """

    def num_top(p: PlannedSequence) -> int:
        return top_tokens if p.sequence.seq_id in top_tokens_for else 0

    logits, offsets = runner.compute(rows, model.device_logits)
    trees = {
        i: TreeToAccept(p.tree, p.sequence.sampler, p.sequence.stops_at, num_top(p))
        for i, p in enumerate(planned)
        if p.tree is not None and _is_accepted_there(p.sequence)
    }
    commits: dict[int, Commit] = {}
    if trees:
        own = [logits[offsets[i] : offsets[i + 1]] for i in trees]
        whole = logits if sum(map(len, own)) == len(logits) else torch.cat(own)
        commits = dict(zip(trees, accept_on_device(whole, list(trees.values()), vocab_size), strict=True))
    elif logits.is_cuda:
        torch.cuda.synchronize()  # the step's time is measured

    def on_host(i: int) -> Commit:
        return lambda: accept_on_host(planned[i], logits[offsets[i] : offsets[i + 1]].cpu().numpy())

    return [commits.get(i) or on_host(i) for i in range(len(planned))]


def _is_accepted_there(sequence: Sequence) -> bool:
    """Whether the device knows all that chooses a sequence's tokens."""
    return is_replayed(sequence.sampler, sequence.submission.limits.acceptance) and not sequence.sampler.is_constrained
