"""Puts row-exact products and activations into a transformers model in place of its own.

torch gives a row other bits with other rows beside it; see `linear` for products. Activations differ because vector
code and the scalar code for what is left at the end of a stretch do, and torch cuts large tensors between threads
anywhere. Everything else that these models do treats rows one by one, which `exactness` measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from treeserve_engine.linear import Linear, RowTiles, find_row_tiles, pieces_of_one_thread

_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
_FALCON_LINEAR = "FalconLinear"  # the same, written out
_ROUTER_ROWS = 4  # rows of one product; see `linear`
_VECTOR = 64  # elements of the widest unrolled vector loop, in any dtype


class RowExactLinear(nn.Module):
    """A linear layer on row tiles."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = Linear(weight.detach(), None if bias is None else bias.detach())
        self.tiles = RowTiles(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., K] to [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        n = len(rows)
        if n == 0:
            return x.new_empty((*x.shape[:-1], self.linear.shape[0]))
        padded = functional.pad(rows, (0, 0, 0, self.tiles.padded(n) - n))
        y = self.linear(padded, self.tiles)[:n]
        if y.shape[1] == 1:  # a gate for each row: apart in memory, so that no vector code runs across rows
            y = functional.pad(y, (0, 1))[:, :1]
        return y.view(*x.shape[:-1], -1)


class RowExactActivation(nn.Module):
    """An elementwise function, whole rows at a time, each of whole vectors."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to [..., N]."""
        width = x.shape[-1]
        rows = functional.pad(x.reshape(-1, width), (0, -width % _VECTOR)).contiguous()
        outputs = [self.function(piece) for piece in pieces_of_one_thread(rows)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[:, :width].view(x.shape)


class RowExactExperts(nn.Module):
    """The experts of a mixture. Each computes its tokens on row tiles; a token adds up its experts in rank order."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self.first = _expert_linears(experts, first)
        self.down = _expert_linears(experts, "down_proj")
        self._activation = experts._apply_gate if experts.has_gate else experts.act_fn

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Mix [T, H] by the experts and weights [T, k] of each token."""
        num_tokens, top_k = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        outputs = hidden.new_empty((num_tokens * top_k, hidden.shape[1]))
        for expert in sorted(set(chosen.tolist())):
            places = (chosen == expert).nonzero()[:, 0]
            x = self.first[expert](hidden.index_select(0, places // top_k))
            outputs[places] = self.down[expert](self._activation(x)).to(outputs.dtype)
        weighted = (outputs * top_k_weights.reshape(-1, 1)).view(num_tokens, top_k, -1)
        mixed = weighted[:, 0]
        for rank in range(1, top_k):
            mixed = mixed + weighted[:, rank]
        return mixed.to(hidden.dtype)


@torch.inference_mode()
def make_rows_exact(model: nn.Module) -> RowTiles:
    """Replace what can be replaced; every weight is held once, in its packed layout.

    Returns:
        The row counts that are computed in one piece.
    """
    names = [name for name, _ in model.named_modules() if name]
    for name in reversed(names):  # what a module contains before the module
        parent, _, child = name.rpartition(".")
        _replace(model.get_submodule(parent), child)
    linears = [module for module in model.modules() if isinstance(module, RowExactLinear)]
    tiles = find_row_tiles(module.linear for module in linears)
    for module in linears:
        module.tiles = tiles
    return tiles


def _routed_in_tiles(route: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
    """The experts of every row of [..., H], found for a few rows at a time by transformers' own router.

    Args:
        route: gives one tensor or several, each with a row for every row.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    n = len(rows)
    padded = functional.pad(rows, (0, 0, 0, -n % _ROUTER_ROWS))
    parts = [route(tile) for tile in torch.split(padded, _ROUTER_ROWS)]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)[:n]
    return tuple(torch.cat(outputs)[:n] for outputs in zip(*parts, strict=True))


def _replace(parent: nn.Module, name: str) -> None:
    module = parent.get_submodule(name)
    if type(module).__name__.endswith("Router"):
        setattr(module, "forward", functools.partial(_routed_in_tiles, module.forward))  # noqa: B010
    exact = _exact(module)
    if exact is not None:
        setattr(parent, name, exact)


def _exact(module: nn.Module) -> nn.Module | None:
    """What takes the module's place."""
    kind = type(module)
    if isinstance(module, nn.Linear) and (kind is nn.Linear or kind.__name__ == _FALCON_LINEAR):
        return RowExactLinear(module.weight, module.bias)
    if isinstance(module, Conv1D):
        return RowExactLinear(module.weight.t().contiguous(), module.bias)
    if kind.__module__ in _ACTIVATION_MODULES and not list(module.parameters()):
        return RowExactActivation(module)
    if _is_experts(module):
        return RowExactExperts(module)
    return None


def _is_experts(module: nn.Module) -> bool:
    """Whether transformers' interface for experts describes the module, and completely."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")):
        return False
    return not module.has_post_expert_norm and hasattr(module, "down_proj")


def _expert_linears(experts: Any, name: str) -> nn.ModuleList:
    """One linear layer for each expert. Takes the weights out of `experts`."""
    weights = cast(torch.Tensor, getattr(experts, name))
    biases = getattr(experts, f"{name}_bias") if experts.has_bias else [None] * len(weights)
    delattr(experts, name)
    turned = weights.transpose(1, 2) if experts.is_transposed else weights
    return nn.ModuleList(RowExactLinear(w.contiguous(), b) for w, b in zip(turned, biases, strict=True))
