"""Which kernels run on a device: Triton's on a CUDA device, the torch twins elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from treeserve_kernels import kv, next_token, tree_attention
from treeserve_kernels.next_token import SamplingRows
from treeserve_kernels.tree_attention import TreeAttentionMeta


class Attention(Protocol):
    """The signature of `tree_attention`."""

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: TreeAttentionMeta, scale: float
    ) -> torch.Tensor:
        """Attend from every row to its visible KV."""


class Copy(Protocol):
    """The signature of `write_kv` and `move_kv`."""

    def __call__(self, cache: torch.Tensor, first: torch.Tensor, second: torch.Tensor, /) -> None:
        """Change rows of the cache in place."""


class Sampling(Protocol):
    """The signature of `choose_tokens` and `walk_trees`."""

    def __call__(self, values: torch.Tensor, rows: SamplingRows, /) -> torch.Tensor:
        """Compute int32 results from logits or tokens."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one kind of device; see the twins for what each does."""

    attention: Attention
    write_kv: Copy
    move_kv: Copy
    choose_tokens: Sampling
    walk_trees: Sampling


TWINS = Kernels(tree_attention.tree_attention, kv.write_kv, kv.move_kv, next_token.choose_tokens, next_token.walk_trees)


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for a device. Imports Triton only where it is used."""
    if device.type != "cuda":
        return TWINS
    from treeserve_kernels.triton.kv import move_kv_triton, write_kv_triton
    from treeserve_kernels.triton.next_token import choose_tokens_triton
    from treeserve_kernels.triton.tree_attention import tree_attention_triton
    from treeserve_kernels.triton.walk import walk_trees_triton

    return Kernels(tree_attention_triton, write_kv_triton, move_kv_triton, choose_tokens_triton, walk_trees_triton)
