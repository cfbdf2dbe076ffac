"""A small decoder made of the target's own first layers, for training: packed sequences, bfloat16 products.

Weights are kept in float32 and rounded to bfloat16 for each step: products of the two types differ by a factor of four
to five in time on CPUs that have bfloat16 dot products, and the optimiser's steps are too small for bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import ModelConfig, load_config
from treeserve_engine.rope import RopeTable
from treeserve_engine.weights import FloatWeights, LayerTensors, LinearTensors
from treeserve_kernels.cpu.packing import PackedLinear, unpack_linear
from treeserve_speculator.ssm_file import SsmFile
from treeserve_training.distillation_loss import distillation_loss
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.packed_batch import PackedBatch

_TRAINING_DTYPE = torch.bfloat16
# The target's norm is made for its last layer; early hidden states, as large, would make a far too sure drafter.
_NORM_SCALE = 0.2


class SsmLayer(nn.Module):
    """One decoder layer. H is the hidden size, D the head dimension."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.config = config
        self.input_norm = nn.Parameter(tensors.input_norm.clone())
        self.qkv = nn.Parameter(tensors.qkv.weight.clone())
        self.attention_output = nn.Parameter(tensors.attention_output.weight.clone())
        self.feed_forward_norm = nn.Parameter(tensors.feed_forward_norm.clone())
        self.gate_up = nn.Parameter(tensors.gate_up.weight.clone())
        self.down = nn.Parameter(tensors.down.weight.clone())

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        masks: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Map float32[T, H].

        Args:
            rotation: cosines and sines of each row, [T, 1, D / 2].
            masks: of each sequence, from `causal_masks`.
            rows: those that are wanted, of the last layer; None for all.
        """
        attended = self._attended(_normed(x, self.input_norm, self.config), rotation, masks)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        x = x + functional.linear(attended, _rounded(self.attention_output))
        gate_up = functional.linear(_normed(x, self.feed_forward_norm, self.config), _rounded(self.gate_up))
        gate, up = gate_up.chunk(2, 1)
        return x + functional.linear(functional.silu(gate) * up, _rounded(self.down))

    def _attended(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], masks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Attention within each sequence: [T, heads * D].

        Query heads that share keys are rows of one product; torch's own attention took three times as long, back pass
        included (300 rows, one thread).
        """
        c = self.config
        heads = functional.linear(x, _rounded(self.qkv)).view(len(x), -1, c.head_dim)
        turned = _rotated(heads[:, : c.num_heads + c.num_kv_heads], *rotation)
        q, k = torch.split(turned, [c.num_heads, c.num_kv_heads], 1)
        v = heads[:, c.num_heads + c.num_kv_heads :]
        shared = c.num_heads // c.num_kv_heads
        lengths = [len(mask) for mask in masks]
        outputs = []
        for qs, ks, vs, mask in zip(*(torch.split(x, lengths) for x in (q, k, v)), masks, strict=True):
            n = len(mask)
            q_rows = (
                qs.view(n, c.num_kv_heads, shared, c.head_dim)
                .permute(1, 2, 0, 3)
                .reshape(c.num_kv_heads, -1, c.head_dim)
            )
            bias = mask.repeat(shared, 1)
            scores = torch.baddbmm(bias, q_rows, ks.permute(1, 2, 0), alpha=c.head_dim**-0.5)
            mixed = torch.softmax(scores, -1) @ vs.transpose(0, 1)
            outputs.append(mixed.view(c.num_kv_heads, shared, n, c.head_dim).permute(2, 0, 1, 3).reshape(n, -1))
        return torch.cat(outputs)


class SsmModel(nn.Module):
    """The decoder up to its last hidden states, and the weight of its output layer.

    Attributes:
        head: [N, H], a row for each token of the draft vocabulary.
    """

    embedding: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: Sequence[SsmLayer],
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.Parameter(norm)
        self.head = nn.Parameter(head)
        rope = RopeTable.of(config)
        self._cos, self._sin = torch.from_numpy(rope.cos), torch.from_numpy(rope.sin)

    @classmethod
    def from_target(cls, folder: Path, vocabulary: DraftVocabulary, num_layers: int) -> Self:
        """A drafter of the target's first layers, its embedding, and its output layer's rows for the vocabulary.

        Raises:
            InvalidArgumentError: if the target is none that this can be made of.
        """
        config = load_config(folder)
        if config.qkv_bias or config.output_bias or config.qk_norm:
            raise InvalidArgumentError("model", "a drafter is made of plain Llama layers: no biases, no norms of heads")
        if not 1 <= num_layers <= config.num_layers:
            raise InvalidArgumentError("layers", f"{num_layers} of the target's {config.num_layers}")
        tensors = FloatWeights.of(folder, config, torch.float32, torch.device("cpu"))
        own = replace(config, num_layers=num_layers)
        embedding = tensors.embedding()
        layers = [SsmLayer(own, layer) for layer, _ in zip(tensors.layers(), range(num_layers), strict=False)]
        head = tensors.head(embedding).weight[torch.from_numpy(vocabulary.token_ids)].clone()
        return cls(own, embedding.to(_TRAINING_DTYPE), layers, tensors.norm() * _NORM_SCALE, head)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Normalised hidden states of the rows that are trained on: bfloat16[K, H]."""
        x = self.embedding.index_select(0, batch.token_ids).float()
        rotation = tuple(table[batch.positions].unsqueeze(1).to(_TRAINING_DTYPE) for table in (self._cos, self._sin))
        masks = causal_masks(batch.lengths)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, masks, batch.rows if i + 1 == len(self.layers) else None)
        return _normed(x, self.norm, self.config)

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        """Summed over the rows that are trained on; see `distillation_loss`."""
        return distillation_loss(self(batch), _rounded(self.head), batch.target_ids, batch.target_weights)

    @torch.inference_mode()
    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """Of the rows that are trained on: bfloat16[K, N]."""
        logits: torch.Tensor = self(batch) @ _rounded(self.head).t()
        return logits

    @torch.no_grad()
    def load_packed(self, packed: SsmFile) -> None:
        """Take over the weights of a drafter on disk, which has this one's sizes."""
        self.norm.copy_(torch.from_numpy(packed.norm.copy()))
        self.head.copy_(_unpacked(packed.head))
        for layer, held in zip(self.layers, packed.layers, strict=True):
            assert isinstance(layer, SsmLayer)
            layer.input_norm.copy_(torch.from_numpy(held.input_norm.copy()))
            layer.feed_forward_norm.copy_(torch.from_numpy(held.feed_forward_norm.copy()))
            layer.qkv.copy_(_unpacked(held.qkv))
            layer.attention_output.copy_(_unpacked(held.attention_output))
            layer.gate_up.copy_(_unpacked(held.gate_up))
            layer.down.copy_(_unpacked(held.down))

    def layer_tensors(self) -> list[LayerTensors]:
        """The layers as the engine takes them, float32."""
        return [
            LayerTensors(
                input_norm=layer.input_norm.detach(),
                qkv=LinearTensors(layer.qkv.detach()),
                q_norm=None,
                k_norm=None,
                attention_output=LinearTensors(layer.attention_output.detach()),
                feed_forward_norm=layer.feed_forward_norm.detach(),
                gate_up=LinearTensors(layer.gate_up.detach()),
                down=LinearTensors(layer.down.detach()),
            )
            for layer in self.layers
            if isinstance(layer, SsmLayer)
        ]


def causal_masks(lengths: Sequence[int]) -> list[torch.Tensor]:
    """For each sequence what is added to its scores: bfloat16[n, n], 0 at and below the diagonal, -inf above."""
    longest = max(lengths)
    mask = torch.full((longest, longest), float("-inf"), dtype=_TRAINING_DTYPE).triu_(1)
    return [mask[:n, :n] for n in lengths]


def _unpacked(linear: PackedLinear) -> torch.Tensor:
    weight, scales = unpack_linear(linear)
    return torch.from_numpy(weight.astype(np.float32) * scales[:, None])


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(_TRAINING_DTYPE)


def _normed(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, config.rms_norm_eps).to(_TRAINING_DTYPE)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
