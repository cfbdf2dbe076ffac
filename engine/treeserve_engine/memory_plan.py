"""What a model will take of a machine's memory, counted before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import raw_config
from treeserve_engine.memory_limits import resident_bytes
from treeserve_engine.precision import Precision
from treeserve_engine.weight_files import parameter_count

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = 4  # beside each int8 key and value head
_LANES = 16
_CACHE_LINE = 64
_TORCH_BYTES = 280_000_000  # it and transformers, once imported
_ACTIVATION_BUFFERS = 6  # of the widest layer's rows, all engines taken together
# Names of a size in the configurations of different families.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", *_HEADS)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff")


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that memory depends on, read from a checkpoint's config.json and file headers.

    Attributes:
        parameters: of the whole checkpoint.
        embedding: those of the input embedding.
        is_tied: the output layer is the embedding.
    """

    parameters: int
    embedding: int
    is_tied: bool
    vocab_size: int
    widest: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, folder: Path) -> ModelSizes:
        """Those of a Hugging Face folder.

        Raises:
            InvalidArgumentError: if a file is missing or damaged, or config.json names a size nowhere.
        """
        raw = raw_config(folder)
        text = raw.get("text_config")
        raw = text if isinstance(text, dict) and text else raw
        heads, hidden = _first(raw, _HEADS), _first(raw, _HIDDEN)
        vocab_size, parameters = _first(raw, ("vocab_size",)), parameter_count(folder)
        if heads < 1 or vocab_size * hidden > parameters:
            reason = f"config.json names {heads} heads and {vocab_size} x {hidden} embeddings; it cannot be"
            raise InvalidArgumentError("model", f"{reason}: its weights hold {parameters} numbers")
        return cls(
            parameters=parameters,
            embedding=vocab_size * hidden,
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            vocab_size=vocab_size,
            widest=_first(raw, _INTERMEDIATE, default=4 * hidden),
            num_layers=_first(raw, _LAYERS),
            num_kv_heads=_first(raw, _KV_HEADS),
            head_dim=_first(raw, ("head_dim",), default=hidden // heads),
        )

    def kv_bytes(self, precision: Precision, num_blocks: int, block_size: int) -> int:
        """Memory that a full KV cache takes."""
        number, heads = _BYTES[precision.kv_dtype], self.num_layers * self.num_kv_heads
        if not precision.is_native:
            return num_blocks * block_size * heads * 2 * self.head_dim * number
        # Slots lie in groups of as many as a vector has lanes; values are padded to whole vectors.
        scale = _SCALE_BYTES if precision.kv_dtype == "int8" else 0
        keys = _padded(_LANES * self.head_dim * number, _CACHE_LINE)
        values = _LANES * _padded(self.head_dim, _LANES) * number
        group = heads * (keys + values + 2 * _LANES * scale)
        return num_blocks * -(-block_size // _LANES) * group

    def weight_bytes(self, precision: Precision, device: str) -> int:
        """Memory that a forward pass walks through.

        The embedding's rows are not counted beside int8 weights: they are mapped from a file, and a step reads one
        row a token. On CPUs torch keeps a tied output layer once more, in a layout of its own.
        """
        read = self.parameters if self.is_tied else self.parameters - self.embedding
        if precision.is_native:
            return read
        if precision.dtype == "int8":  # the twin holds whole numbers as float32
            return (read + self.embedding) * _BYTES["float32"]
        copies = self.embedding if self.is_tied and device.startswith("cpu") else 0
        return (self.parameters + copies) * _BYTES[precision.dtype]

    def scratch_bytes(self, rows: int) -> int:
        """An upper estimate of what a forward pass over so many rows works in: logits and activations in float32."""
        return rows * (self.vocab_size + _ACTIVATION_BUFFERS * self.widest) * _BYTES["float32"]


@dataclass(frozen=True)
class MemoryPlan:
    """What a process takes when it is at work, in bytes.

    Attributes:
        weights: read by every forward pass.
        kv: the KV cache when it is full, which holds `kv_tokens`.
        scratch: of the largest forward pass.
        base: the process without a model: interpreter, libraries, tokenizer.
        spilled: KV that was evicted and is kept, when its tier is full.
        advice: what takes less memory, for who must lower it.
    """

    weights: int
    kv: int
    kv_tokens: int
    scratch: int
    base: int
    spilled: int = 0
    advice: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        sizes: ModelSizes,
        precision: Precision,
        *,
        device: str,
        num_blocks: int,
        block_size: int,
        rows: int,
        base: int | None = None,
        spilled: int = 0,
    ) -> MemoryPlan:
        """Plan for a model.

        Args:
            device: where it runs; on a GPU the plan is of the GPU's memory.
            num_blocks, block_size: of its KV cache.
            rows: most rows of a forward pass.
            base: what this process takes already; measured by default.
            spilled: host memory for evicted KV.
        """
        if device.startswith("cuda"):
            base = spilled = 0
        elif base is None:
            base = resident_bytes() + (0 if precision.is_native else _TORCH_BYTES)
        return cls(
            weights=sizes.weight_bytes(precision, device),
            kv=sizes.kv_bytes(precision, num_blocks, block_size),
            kv_tokens=num_blocks * block_size,
            scratch=sizes.scratch_bytes(rows),
            base=base,
            spilled=spilled,
            advice=_advice(precision),
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.scratch + self.base + self.spilled

    def table(self) -> dict[str, str]:
        """For people: what takes how much."""
        parts = {
            "weights": self.weights,
            "kv": self.kv,
            "scratch": self.scratch,
            "process": self.base,
            "spilled_kv": self.spilled,
            "total": self.total,
        }
        return {name: megabytes(size) for name, size in parts.items() if size}

    def check(self, available: int, tokens_field: str = "kv_tokens") -> None:
        """Refuse to start if it does not fit.

        Args:
            available: bytes that this process may take, those it has included.
            tokens_field: name of the setting that holds the KV cache's capacity.

        Raises:
            InvalidArgumentError: with what is needed, what there is and what would fit.
        """
        if self.total <= available:
            return
        parts = ", ".join(f"{name} {size}" for name, size in self.table().items() if name != "total")
        reason = f"needs {megabytes(self.total)} of memory: {parts}; {megabytes(available)} available"
        advice = " or ".join([*(["lower kv_host_mb"] if self.spilled else []), *([self.advice] if self.advice else [])])
        tokens = (available - self.total + self.kv) * self.kv_tokens // self.kv
        if tokens < 1:
            raise InvalidArgumentError("memory", f"{reason}; the model does not fit{advice and ': '}{advice}")
        also = f", or {advice}" if advice else ""
        raise InvalidArgumentError(tokens_field, f"{reason}; lower {tokens_field} to at most {tokens}{also}")


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _advice(precision: Precision) -> str:
    if precision.dtype != "int8":
        smaller = "int8 or bfloat16" if precision.dtype == "float32" else "int8"
        return f"use dtype {smaller}"
    if precision.kv_dtype == "float32":
        return "use kv_dtype bfloat16"
    return "use kv_dtype int8" if precision.kv_dtype == "bfloat16" and precision.is_native else ""


def _first(raw: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if default is None:
        raise InvalidArgumentError("model", f"config.json names no {names[0]}")
    return default


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
