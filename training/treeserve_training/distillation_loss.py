"""Cross-entropy of a drafter against a few likely tokens a row, with the output layer inside.

The logits of a step would take more memory, and time to write and read it, than all else in it: they are made a few
rows at a time, turned into their own gradient, and forgotten.
"""

from __future__ import annotations

from typing import Any

import torch

_CHUNK_ROWS = 64  # logits of 8,000 tokens in float32: 2 MB, which a core's cache holds


class _DistillationLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, target_ids: torch.Tensor, target_weights: torch.Tensor
    ) -> torch.Tensor:
        gradient = hidden.new_empty((len(hidden), len(head)))
        loss = 0.0
        row_weights = target_weights.sum(1, keepdim=True)
        for start in range(0, len(hidden), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            logits = (hidden[rows] @ head.t()).float()
            logits -= logits.amax(1, keepdim=True)
            wanted = logits.gather(1, target_ids[rows])
            exponentials = logits.exp_()
            totals = exponentials.sum(1, keepdim=True)
            loss += float((target_weights[rows] * (totals.log() - wanted)).sum())
            exponentials *= row_weights[rows] / totals
            exponentials.scatter_add_(1, target_ids[rows], -target_weights[rows])
            gradient[rows] = exponentials
        ctx.save_for_backward(hidden, head, gradient)
        return hidden.new_tensor(loss, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (scale,) = outputs
        hidden, head, gradient = ctx.saved_tensors
        return (gradient @ head) * scale, (gradient.t() @ hidden) * scale, None, None


def distillation_loss(
    hidden: torch.Tensor, head: torch.Tensor, target_ids: torch.Tensor, target_weights: torch.Tensor
) -> torch.Tensor:
    """Sum over rows and their targets of weight * -log q(target), q the softmax over the draft vocabulary.

    Args:
        hidden: bfloat16[K, H].
        head: bfloat16[N, H].
        target_ids: int64[K, M]; an id may come twice in a row.
        target_weights: float32[K, M].
    """
    loss: torch.Tensor = _DistillationLoss.apply(hidden, head, target_ids, target_weights)  # type: ignore[no-untyped-call]
    return loss
