"""Repairs to transformers' models that would not let another attention in, though they compute what we support."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Models that do not pass keyword arguments on to their attention, with its name in a layer.
_DROP_KEYWORDS = {"falcon": "self_attention", "nemotron": "self_attn", "stablelm": "self_attn"}

Attend = Callable[..., tuple[torch.Tensor, None]]


def lets_attention_in(config: Any, model_class: Any) -> bool:
    """Whether the model's attention can be replaced, after `repair` if need be."""
    if config.model_type == "falcon":
        return not config.alibi
    return bool(model_class._can_set_attn_implementation())


def repair(model: Any, attend: Attend) -> None:
    """Make keyword arguments arrive at attention, and attention at `attend`. Does nothing to most models."""
    model_type = model.config.model_type
    if model_type in _DROP_KEYWORDS:
        _hand_step_down(model, _DROP_KEYWORDS[model_type])
    if model_type == "falcon":
        _route_falcon(model, attend)


def _hand_step_down(model: nn.Module, attention: str) -> None:
    """Give every attention the step that the model was called with."""
    handed: dict[str, Any] = {}

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        handed["tree_step"] = kwargs.get("tree_step")

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **handed}

    def clear(*_: Any) -> None:
        handed.clear()

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(clear, always_call=True)
    for layer in model.modules():
        if hasattr(layer, attention):
            getattr(layer, attention).register_forward_pre_hook(give, with_kwargs=True)


def _route_falcon(model: Any, attend: Attend) -> None:
    """Falcon's attention calls torch itself; this puts the rotary form of it onto the interface."""
    from transformers.models.falcon import modeling_falcon

    rotate: Any = modeling_falcon.apply_rotary_pos_emb

    def forward(
        self: Any, hidden: torch.Tensor, *, position_embeddings: Any, tree_step: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        heads = self._split_heads(self.query_key_value(hidden))
        q, k, v = (x.transpose(1, 2) for x in heads)
        q, k = rotate(q, k, *position_embeddings)
        if self.new_decoder_architecture:  # repeated for every query head
            k, v = (x[:, :: self.num_heads // self.num_kv_heads] for x in (k, v))
        attended, _ = attend(self, q, k, v, tree_step=tree_step)
        return self.dense(attended.flatten(2)), None

    for module in model.modules():
        if isinstance(module, modeling_falcon.FalconAttention):
            setattr(module, "forward", functools.partial(forward, module))  # noqa: B010 (mypy takes it for a method)
