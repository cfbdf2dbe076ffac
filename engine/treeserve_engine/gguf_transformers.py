"""A checkpoint folder out of a GGUF file whose architecture transformers reads and our own converter does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, modeling_gguf_pytorch_utils

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.gguf_file import GgufFile
from treeserve_engine.gguf_tokenizer import write_tokenizer
from treeserve_engine.gguf_weights import special_token_ids
from treeserve_engine.transformers_config import AutoConfig, AutoModel, read_transformers_config
from treeserve_engine.weight_files import SINGLE_FILE


def convert_through_transformers(source: Path, file: GgufFile, folder: Path, progress: Callable[[str], None]) -> None:
    """Write config.json, the tokenizer and float32 weights into `folder`.

    Raises:
        InvalidArgumentError: if transformers does not read the architecture, or the model is refused.
    """
    if file.architecture not in modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES:
        raise InvalidArgumentError("model", f"GGUF architecture {file.architecture!r} is not supported")
    try:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        config.architectures = [AutoModel._model_mapping[type(config)].__name__]
    except Exception as error:  # whatever transformers raises for what the file lacks
        raise _unreadable(file, error) from error
    config.save_pretrained(folder)
    read_transformers_config(folder)  # refuse an unsupported model before the long part
    progress("converting the tokenizer")
    _write_tokenizer(source, file, folder)
    ids = special_token_ids(file)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    progress("converting the weights to float32")
    _write_weights(source, file, config, folder)


def _write_tokenizer(source: Path, file: GgufFile, folder: Path) -> None:
    """Byte-level vocabularies as for every GGUF file; SentencePiece ones as transformers converts them."""
    if file.required("tokenizer.ggml.model") == "gpt2":
        write_tokenizer(file, folder)
        return
    try:
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    except Exception as error:  # whatever transformers raises
        raise _unreadable(file, error) from error
    if not (folder / "tokenizer.json").is_file():
        raise InvalidArgumentError("model", "the tokenizer of this GGUF file cannot be converted to tokenizer.json")


def _write_weights(source: Path, file: GgufFile, config: Any, folder: Path) -> None:
    with torch.device("meta"):
        names = AutoModel.from_config(config)
    try:
        read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
        tensors = read(str(source), return_tensors=True, model_to_load=names)["tensors"]
    except Exception as error:  # whatever transformers raises
        raise _unreadable(file, error) from error
    whole = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / SINGLE_FILE, metadata={"format": "pt"})


def _unreadable(file: GgufFile, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError("model", f"transformers cannot read this {file.architecture!r} GGUF file: {error}")
