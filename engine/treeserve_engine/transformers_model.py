"""Any decoder that transformers runs, with tree attention over a paged KV cache in place of its own.

The ragged batch goes in as one sequence of all rows with explicit positions; the model's own code computes everything
but attention. On a CPU, products and activations are replaced by row-exact ones. What is loaded is compared with the
model's own attention first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import structlog
import torch
import transformers
from torch.nn import functional

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.exact_modules import make_rows_exact
from treeserve_engine.kv_cache import KvCache
from treeserve_engine.linear import RowTiles
from treeserve_engine.torch_batch import TorchBatch
from treeserve_engine.transformers_config import (
    TESTED_MODEL_TYPES,
    AutoModel,
    TransformersLimits,
    context_window,
    read_transformers_config,
    within_windows,
)
from treeserve_engine.transformers_probe import check_against_own_attention, expected_logits
from treeserve_engine.transformers_repairs import repair
from treeserve_kernels.dispatch import kernels_for
from treeserve_kernels.kv import write_kv
from treeserve_kernels.tree_attention import tree_attention

_log = structlog.get_logger(__name__)

_IMPLEMENTATION = "treeserve_tree"
# Arguments of transformers' attention functions that ask for nothing a causal decoder does not do anyway.
_HARMLESS = {
    "dropout", "position_ids", "use_cache", "cache_position", "position_embeddings", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "sliding_window",
}  # fmt: skip


class _Step(Protocol):
    """What a forward pass does where the model attends. Passed through the model as a keyword argument."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Attending) -> torch.Tensor:
        """Attend from [T, H, D] with new keys [T, KVH, D] and values [T, KVH, Dv]; gives [T, H, Dv]."""


@dataclass(frozen=True)
class _Attending:
    """One attention call's settings."""

    scale: float
    softcap: float | None
    window: int | None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    tree_step: _Step | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, H, T, D], key and value [1, KVH, T, D]; gives [1, T, H, D]."""
    if tree_step is None:
        raise InvalidArgumentError("model", "it does not pass keyword arguments on to its attention")
    causal = getattr(module, "is_causal", True) and others.pop("is_causal", True) is not False
    if attention_mask is not None or not causal:
        raise InvalidArgumentError("model", "its attention is not plain causal attention")
    asked = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if asked:
        raise InvalidArgumentError("model", f"its attention needs {', '.join(asked)}, which is not supported")
    how = _Attending(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, others.get("sliding_window"))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tree_step.attend(q, k, v, how)[None], None


transformers.AttentionInterface.register(_IMPLEMENTATION, _attention)


@dataclass(frozen=True)
class _Layer:
    """Shape of the KV of one attention call."""

    num_kv_heads: int
    head_dim: int


@dataclass
class _Recording:
    """Notes what the model's attention calls ask for, in their order."""

    layers: list[_Layer] = field(default_factory=list)
    calls: list[_Attending] = field(default_factory=list)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Attending) -> torch.Tensor:
        """Attends to nothing."""
        self.layers.append(_Layer(k.shape[1], max(k.shape[2], v.shape[2])))
        self.calls.append(how)
        return v.new_zeros((*q.shape[:2], v.shape[2]))


@dataclass
class _TreeStep:
    """Writes the batch's KV and attends along its trees. Layers are told apart by the order of their calls."""

    batch: TorchBatch
    kv: KvCache
    calls: int = 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Attending) -> torch.Tensor:
        """Of the batch's rows; those that pad it stay zero."""
        keys, values = self.kv.keys[self.calls], self.kv.values[self.calls]
        self.calls += 1
        rows, padding = len(self.batch.input_ids), len(q) - len(self.batch.input_ids)
        write_kv(keys, self.batch.slot_mapping, _widened(k[:rows], keys.shape[2]))
        write_kv(values, self.batch.slot_mapping, _widened(v[:rows], keys.shape[2]))
        queries = _widened(q[:rows], keys.shape[2])
        output = _tree_attention(queries, keys, values, self.batch, how)[..., : v.shape[2]].to(v.dtype)
        return functional.pad(output, (0, 0, 0, 0, 0, padding))


def _widened(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Zeros behind each head, where keys and values differ in width."""
    return x if x.shape[2] == head_dim else functional.pad(x, (0, head_dim - x.shape[2]))


def _tree_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: TorchBatch, how: _Attending
) -> torch.Tensor:
    if q.device.type != "cuda":
        return tree_attention(q, keys, values, batch.attention, how.scale, softcap=how.softcap)
    return kernels_for(q.device).attention(q.to(keys.dtype), keys, values, batch.attention, how.scale)


class TransformersModel:
    """A transformers model as an `interface.Model`. Load and run it in one thread."""

    def __init__(
        self, model: Any, limits: TransformersLimits, layers: Sequence[_Layer], dtype: torch.dtype, tiles: RowTiles
    ) -> None:
        self.config = limits
        self._model = model
        self._layers = tuple(layers)
        self._dtype = dtype
        self._tiles = tiles

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Load a Hugging Face folder and compare it with what transformers computes by itself.

        Args:
            folder: holds config.json and safetensors weights.
            dtype: of weights, activations and KV.
            device: where everything lives.

        Raises:
            InvalidArgumentError: if the model is refused, with the reason.
        """
        config = read_transformers_config(folder)
        context = context_window(config)
        own = cls.of(_load_model(folder, config, dtype, device), context, dtype)
        if config.model_type not in TESTED_MODEL_TYPES:
            _log.warning("an untested architecture, but it agrees with itself here", model_type=config.model_type)
        return own

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, context: int, dtype: torch.dtype) -> Self:
        """Take over a loaded model: it can no longer be used without this class. See `load`."""
        device = model.device
        try:
            expected = expected_logits(model)
            _replace_attention(model)
            tiles = make_rows_exact(model) if device.type == "cpu" else RowTiles(())
            recording = _record(model)
        except InvalidArgumentError:
            raise
        except Exception as error:  # any model code may run here
            raise InvalidArgumentError("model", f"it does not run through transformers: {error!r}") from error
        if device.type == "cuda" and any(call.softcap for call in recording.calls):
            raise InvalidArgumentError("model", "capped attention scores are supported on CPUs only")
        windows = [call.window for call in recording.calls if call.window is not None]
        limits = TransformersLimits(expected.vocab_size, within_windows(context, windows))
        self = cls(model, limits, recording.layers, dtype, tiles)
        check_against_own_attention(self, expected, rounds=dtype != torch.float32 or device.type == "cuda")
        return self

    def new_kv(self, num_blocks: int, block_size: int) -> KvCache:
        """An empty cache."""

        def tensors() -> tuple[torch.Tensor, ...]:
            shapes = [(num_blocks * block_size, layer.num_kv_heads, layer.head_dim) for layer in self._layers]
            return tuple(torch.zeros(shape, dtype=self._dtype, device=self._model.device) for shape in shapes)

        return KvCache(tensors(), tensors(), block_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvCache) -> npt.NDArray[np.float32]:
        """Compute the rows of a batch, writing their K and V to their slots.

        Returns:
            Logits of the rows asked for, float32[K, vocab_size].
        """
        tensors = TorchBatch.of(batch, self._model.device)
        step = _TreeStep(tensors, kv)
        rows = len(tensors.input_ids)
        padding = (0, self._tiles.padded(rows) - rows)
        # Draft nodes may lie beyond the context window, where nothing is ever accepted; tables of positions end there.
        positions = tensors.positions.clamp(max=self.config.max_position_embeddings - 1)
        logits = _run(
            self._model,
            functional.pad(tensors.input_ids, padding),
            functional.pad(positions, padding),
            tensors.logits_indices,
            step,
        )
        if step.calls != len(self._layers):
            raise RuntimeError(f"the model attended {step.calls} times instead of {len(self._layers)}")
        result: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        return result


def _replace_attention(model: Any) -> None:
    repair(model, _attention)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(_IMPLEMENTATION)  # of every part that has a configuration of its own
    else:
        model.config._attn_implementation = _IMPLEMENTATION  # no masks


def _run(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, step: _Step) -> torch.Tensor:
    """Logits of the rows `kept`, [K, vocab]."""
    output = model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=kept,
        tree_step=step,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _record(model: Any) -> _Recording:
    """What attention is asked for, seen in a pass over four rows."""
    recording = _Recording()
    rows = torch.arange(4, device=model.device)
    logits = _run(model, rows, rows, rows[1:3], recording)
    if len(logits) != 2:
        raise InvalidArgumentError("model", "it does not give the logits of chosen rows")
    return recording


def _load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with its own attention, in the plainest form that transformers has of it."""
    quiet: Any = transformers.utils.logging.disable_progress_bar
    quiet()
    try:
        model, info = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers and the files raise
        raise InvalidArgumentError("model", f"transformers cannot load it: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidArgumentError("model", f"the checkpoint lacks {', '.join(missing[:3])}")
    return model.to(device).eval()
