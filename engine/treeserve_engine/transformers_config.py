"""Which checkpoints can run through transformers, and how long their context is. The rest is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import transformers

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.transformers_repairs import lets_attention_in

_log = structlog.get_logger(__name__)

AutoConfig: Any = transformers.AutoConfig  # its own types say less than it does
AutoModel: Any = transformers.AutoModelForCausalLM

# Tried by `tests/exact/test_families_vs_hf.py`. Others are taken too if they pass the probe at load.
TESTED_MODEL_TYPES = (
    "apertus", "arcee", "biogpt", "bitnet", "codegen", "cohere", "cohere2", "deepseek_v2", "diffllama", "ernie4_5",
    "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj",
    "granite", "granitemoe", "helium", "hunyuan_v1_dense", "minicpm3", "ministral", "mixtral", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
SMALLEST_WINDOW = 256  # a model whose attention reaches less far is refused rather than served in so short a context
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True)
class TransformersLimits:
    """What the services must know of the model; see `interface.ModelLimits`."""

    vocab_size: int
    max_position_embeddings: int


def read_transformers_config(folder: Path) -> Any:
    """The checkpoint's configuration as transformers reads it.

    Raises:
        InvalidArgumentError: if the model cannot be verified in trees: it keeps a state that cannot be rewound, reads
            more than the tokens before it, needs code that comes with it, or does not let its attention be replaced.
    """
    if not (folder / "config.json").is_file():
        raise _refusal(f"{folder} holds no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever transformers, its configuration classes or the file raise
        raise _refusal(f"transformers cannot read its configuration: {_first_line(error)}") from error
    model_type = config.model_type
    if getattr(config, "quantization_config", None):
        raise _refusal("quantised checkpoints are not supported; use plain weights or a .gguf file")
    if config.is_encoder_decoder:
        raise _refusal(f"{model_type!r} is an encoder-decoder; only decoders are supported")
    model_class = AutoModel._model_mapping.get(type(config), None)
    if model_class is None:
        raise _refusal(f"{model_type!r} is not a decoder of text")
    text = config.get_text_config(decoder=True)
    _check_layers(text, model_class)
    if not lets_attention_in(config, model_class):
        raise _refusal(f"transformers does not let the attention of {model_type!r} be replaced")
    return config


def context_window(config: Any) -> int:
    """Tokens of the longest context in which the model computes what its attention without any window would.

    Raises:
        InvalidArgumentError: if the configuration names no length, or attention reaches less than `SMALLEST_WINDOW`.
    """
    text = config.get_text_config(decoder=True)
    lengths = [getattr(text, name, None) for name in _CONTEXT_NAMES]
    named = [n for n in lengths if isinstance(n, int) and n > 0]
    if not named:
        raise _refusal(f"the configuration of {config.model_type!r} names no context length")
    return within_windows(named[0], [*_sliding_windows(text), *_short_rotary_ranges(text)])


def within_windows(context: int, windows: list[int]) -> int:
    """A context clamped to the shortest window: as far as it reaches, attention is full attention.

    Raises:
        InvalidArgumentError: for a window shorter than `SMALLEST_WINDOW`.
    """
    shortest = min(windows, default=context)
    if shortest >= context:
        return context
    if shortest < SMALLEST_WINDOW:
        raise _refusal(f"its attention reaches {shortest} tokens; sliding windows under {SMALLEST_WINDOW} are refused")
    _log.info("the context ends where the model's attention window does", tokens=shortest)
    return shortest


def _check_layers(text: Any, model_class: Any) -> None:
    if getattr(model_class, "_is_stateful", False):
        raise _refusal(f"{text.model_type!r} has recurrent layers, whose state cannot be rewound")
    other = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other:
        raise _refusal(f"{text.model_type!r} has layers of type {', '.join(sorted(other))}")
    if getattr(text, "attention_chunk_size", None):
        raise _refusal(f"{text.model_type!r} attends in chunks of {text.attention_chunk_size} tokens")


def _sliding_windows(text: Any) -> list[int]:
    """How far attention reaches in the layers that have a window."""
    layer_types = getattr(text, "layer_types", None)
    if getattr(text, "use_sliding_window", True) is False or (layer_types and "sliding_attention" not in layer_types):
        return []
    window = getattr(text, "sliding_window", None)
    return [window] if isinstance(window, int) else []


def _short_rotary_ranges(text: Any) -> list[int]:
    """LongRoPE changes all rotations once any sequence of a batch is longer than this, so none may be."""
    return [
        int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
        for rope in _rope_parameters(getattr(text, "rope_parameters", None))
        if rope.get("rope_type") == "longrope"
    ]


def _rope_parameters(raw: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary settings, of which a model may have one or one for each type of layer."""
    if isinstance(raw, Mapping):
        if "rope_type" in raw:
            yield raw
        for value in raw.values():
            yield from _rope_parameters(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _refusal(reason: str) -> InvalidArgumentError:
    return InvalidArgumentError("model", reason)
