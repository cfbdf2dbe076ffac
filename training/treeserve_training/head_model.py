"""A draft head over the target's hidden states, for training: one decoder layer, unrolled over its own outputs.

After EAGLE-3 (Li et al., 2025). A row of token i combines the embedding of i with what is known of the position before:
the target's features for a committed token, the head's own last hidden state for a drafted one. Training unrolls
both: in pass 1 every row has features, in pass n it is the n-th drafted token after those that have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureShape
from treeserve_engine.config import ModelConfig, load_config
from treeserve_engine.rope import RopeTable
from treeserve_engine.weights import FloatWeights, LayerTensors, LinearTensors
from treeserve_training.distillation_loss import distillation_loss
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.packed_batch import PackedBatch
from treeserve_training.ssm_model import SsmLayer

_TRAINING_DTYPE = torch.bfloat16
_NORM_SCALE = 0.2  # see ssm_model.py
_FIRST_FEATURES = 0.05  # how much of the features enters at the beginning, relative to the embedding
_EPSILON = 1e-6  # of the inputs' normalisation


@dataclass(frozen=True)
class HeadBatch(PackedBatch):
    """A batch whose rows begin where a drafter's window does.

    Attributes:
        features: float16[T, D, H], the target's, of the position before each row.
    """

    features: torch.Tensor


@dataclass(frozen=True)
class _Pass:
    """Keys [T, KVH, D] and values of one unrolled pass, its own attention included."""

    keys: torch.Tensor
    values: torch.Tensor


class HeadModel(nn.Module):
    """The head up to its last hidden states, and the weight of its output layer.

    Attributes:
        head: [N, H], a row for each token of the draft vocabulary.
    """

    embedding: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        shape: FeatureShape,
        embedding: torch.Tensor,
        layer: LayerTensors,
        norm: torch.Tensor,
        head: torch.Tensor,
        *,
        passes: int,
        decay: float,
    ) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self._passes = passes
        self._decay = decay
        self.register_buffer("embedding", embedding, persistent=False)
        hidden, depths = config.hidden_size, len(shape.layers)
        # Apart from the weights, whose numbers an optimiser's steps would else outweigh.
        self._scale = float(embedding.float().pow(2).mean().sqrt())
        noise = _FIRST_FEATURES * hidden**-0.5
        self.from_features = nn.Parameter(
            torch.cat((torch.randn(hidden, depths * hidden) * noise, torch.eye(hidden)), 1)
        )
        self.from_hidden = nn.Parameter(torch.cat((torch.randn(hidden, hidden) * noise, torch.eye(hidden)), 1))
        self.layer = SsmLayer(config, layer)
        self.norm = nn.Parameter(norm)
        self.head = nn.Parameter(head)
        rope = RopeTable.of(config)
        self._cos, self._sin = torch.from_numpy(rope.cos), torch.from_numpy(rope.sin)

    @classmethod
    def from_target(
        cls,
        folder: Path,
        shape: FeatureShape,
        vocabulary: DraftVocabulary,
        *,
        layer: int = 1,
        passes: int = 2,
        decay: float = 0.8,
        seed: int = 0,
    ) -> Self:
        """A head that begins as one of the target's layers over its embedding.

        Args:
            layer: which one.
            passes: of the unrolled training.
            decay: what a pass counts, relative to the one before.

        Raises:
            InvalidArgumentError: if the target is none that this can be made of.
        """
        config = load_config(folder)
        if config.qkv_bias or config.output_bias or config.qk_norm:
            raise InvalidArgumentError("model", "a head is made of plain Llama layers: no biases, no norms of heads")
        tensors = FloatWeights.of(folder, config, torch.float32, torch.device("cpu"))
        embedding = tensors.embedding()
        chosen = next(tensors for i, tensors in enumerate(tensors.layers()) if i == layer)
        head = tensors.head(embedding).weight[torch.from_numpy(vocabulary.token_ids)].clone()
        torch.manual_seed(seed)
        return cls(
            replace(config, num_layers=1),
            shape,
            embedding.to(_TRAINING_DTYPE),
            chosen,
            tensors.norm() * _NORM_SCALE,
            head,
            passes=passes,
            decay=decay,
        )

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        """Over the rows that are trained on, the passes weighed so that their weights sum to 1."""
        weights = [self._decay**i for i in range(self._passes)]
        head = self.head.to(_TRAINING_DTYPE)
        losses = [
            weight * distillation_loss(hidden, head, batch.target_ids, batch.target_weights)
            for weight, hidden in zip(weights, self.hidden(batch), strict=True)
        ]
        return torch.stack(losses).sum() / sum(weights)

    def hidden(self, batch: PackedBatch) -> list[torch.Tensor]:
        """Normalised hidden states of the rows that are trained on, of each pass: bfloat16[K, H]."""
        assert isinstance(batch, HeadBatch)
        embedded = _unit(self.embedding.index_select(0, batch.token_ids).float())
        features = _unit(batch.features.float()).flatten(1)
        cos, sin = (table[batch.positions].unsqueeze(1).to(_TRAINING_DTYPE) for table in (self._cos, self._sin))
        x = self._entering(features, embedded, self.from_features)
        passes: list[_Pass] = []
        outputs = []
        for _ in range(self._passes):
            last = self._layer(x, (cos, sin), batch.lengths, passes)
            normed = functional.rms_norm(last.index_select(0, batch.rows), self.norm.shape, self.norm, self._epsilon)
            outputs.append(normed.to(_TRAINING_DTYPE))
            before = torch.cat((torch.zeros_like(last[:1]), last[:-1]))
            x = self._entering(_unit(before), embedded, self.from_hidden)
        return outputs

    def _entering(self, before: torch.Tensor, embedded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat((before, embedded), 1).to(_TRAINING_DTYPE)
        return functional.linear(inputs, weight.to(_TRAINING_DTYPE)).float() * self._scale

    @property
    def _epsilon(self) -> float:
        return self.config.rms_norm_eps

    def _layer(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        lengths: tuple[int, ...],
        passes: list[_Pass],
    ) -> torch.Tensor:
        """The layer's output [T, H]; appends the pass to `passes`."""
        layer, c = self.layer, self.config
        normed = functional.rms_norm(x, layer.input_norm.shape, layer.input_norm, self._epsilon).to(_TRAINING_DTYPE)
        heads = functional.linear(normed, layer.qkv.to(_TRAINING_DTYPE)).view(len(x), -1, c.head_dim)
        turned = _rotated(heads[:, : c.num_heads + c.num_kv_heads], *rotation)
        q, k = torch.split(turned, [c.num_heads, c.num_kv_heads], 1)
        passes.append(_Pass(k, heads[:, c.num_heads + c.num_kv_heads :]))
        attended = torch.cat(
            [
                self._attended(q[first : first + n], [_rows(p, first, n) for p in passes])
                for first, n in zip(_firsts(lengths), lengths, strict=True)
            ]
        )
        x = x + functional.linear(attended, layer.attention_output.to(_TRAINING_DTYPE))
        normed = functional.rms_norm(x, layer.feed_forward_norm.shape, layer.feed_forward_norm, self._epsilon)
        gate, up = functional.linear(normed.to(_TRAINING_DTYPE), layer.gate_up.to(_TRAINING_DTYPE)).chunk(2, 1)
        return x + functional.linear(functional.silu(gate) * up, layer.down.to(_TRAINING_DTYPE))

    def _attended(self, q: torch.Tensor, passes: list[_Pass]) -> torch.Tensor:
        """One sequence's attention [n, heads * D] in the latest of `passes`.

        The m-th pass's row i is the m-th drafted token: it sees the rows with features up to i - m + 1, then itself and
        the drafted tokens between, row i - j of the pass that is j before its own.
        """
        c, n, latest = self.config, len(q), len(passes) - 1
        shared = c.num_heads // c.num_kv_heads
        grouped = q.view(n, c.num_kv_heads, shared, c.head_dim).permute(1, 2, 0, 3)  # [KVH, shared, n, D]
        keys, values = passes[0].keys.permute(1, 0, 2), passes[0].values.permute(1, 0, 2)  # [KVH, n, D]
        scores = grouped.reshape(c.num_kv_heads, -1, c.head_dim) @ keys.transpose(1, 2)
        scores = scores.view(c.num_kv_heads, shared, n, n) + _mask(n, latest)
        drafted = [
            (_shifted(p.keys, latest - 1 - j), _shifted(p.values, latest - 1 - j)) for j, p in enumerate(passes[1:])
        ]
        own = [(grouped * k.permute(1, 0, 2).unsqueeze(1)).sum(-1, keepdim=True) for k, _ in drafted]
        weights = torch.softmax(torch.cat([scores, *own], -1) * c.head_dim**-0.5, -1)
        mixed = (weights[..., :n].reshape(c.num_kv_heads, -1, n) @ values).view(grouped.shape)
        for j, (_, v) in enumerate(drafted):
            mixed = mixed + weights[..., n + j : n + j + 1] * v.permute(1, 0, 2).unsqueeze(1)
        return mixed.permute(2, 0, 1, 3).reshape(n, -1)

    def projections(self) -> tuple[LinearTensors, LinearTensors]:
        """`from_features` and `from_hidden` as the engine takes them, float32."""
        scaled = (weight.detach() * self._scale for weight in (self.from_features, self.from_hidden))
        return LinearTensors(next(scaled)), LinearTensors(next(scaled))

    def layer_tensors(self) -> LayerTensors:
        """The layer as the engine takes it, float32."""
        layer = self.layer
        return LayerTensors(
            input_norm=layer.input_norm.detach(),
            qkv=LinearTensors(layer.qkv.detach()),
            q_norm=None,
            k_norm=None,
            attention_output=LinearTensors(layer.attention_output.detach()),
            feed_forward_norm=layer.feed_forward_norm.detach(),
            gate_up=LinearTensors(layer.gate_up.detach()),
            down=LinearTensors(layer.down.detach()),
        )


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Each vector at a root mean square of 1."""
    return functional.rms_norm(x, x.shape[-1:], eps=_EPSILON)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _mask(n: int, behind: int) -> torch.Tensor:
    """What is added to scores: 0 where column <= row - behind, -inf elsewhere."""
    return torch.full((n, n), float("-inf"), dtype=_TRAINING_DTYPE).triu_(1 - behind)


def _shifted(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Row i holds what row i - by held; zeros before."""
    return rows if by == 0 else torch.cat((torch.zeros_like(rows[:by]), rows[:-by]))[: len(rows)]


def _rows(p: _Pass, first: int, n: int) -> _Pass:
    return _Pass(p.keys[first : first + n], p.values[first : first + n])


def _firsts(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]
