"""Chooses who computes a model, and loads it. What is not used is not imported: int8 runs without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import ModelConfig, is_llama_like, load_config
from treeserve_engine.interface import Model
from treeserve_engine.made_once import default_cache_dir
from treeserve_engine.precision import AUTO, Precision, choose_precision

if TYPE_CHECKING:
    from treeserve_kernels.cpu.decoder import DecoderWeights

_log = structlog.get_logger(__name__)


def load_model(
    folder: Path, *, dtype: str, device: str, threads: int, kv_dtype: str = AUTO, cache_dir: Path | None = None
) -> Model:
    """Load a Hugging Face folder in the calling thread, which must also run it.

    Args:
        folder: holds config.json and safetensors weights.
        dtype, kv_dtype: see `choose_precision`.
        device: torch's name of it.
        threads: CPU threads of a forward pass.
        cache_dir: where int8 weights are kept; by default the user's cache folder.

    Raises:
        InvalidArgumentError: if the model or the combination is not supported.
    """
    precision = choose_precision(folder, dtype, kv_dtype, device)
    if precision.dtype == "int8":
        return _load_int8(folder, precision, threads, cache_dir or default_cache_dir())

    import torch

    torch.set_num_threads(threads)
    torch_dtype, torch_device = getattr(torch, precision.dtype), torch.device(device)
    if is_llama_like(folder):
        from treeserve_engine.cuda_model import CudaLlamaModel
        from treeserve_engine.model import LlamaModel

        llama = CudaLlamaModel if torch_device.type == "cuda" else LlamaModel
        return llama.load(folder, _config_of(folder), torch_dtype, torch_device)

    from treeserve_engine.transformers_model import TransformersModel

    return TransformersModel.load(folder, torch_dtype, torch_device)


def _load_int8(folder: Path, precision: Precision, threads: int, cache_dir: Path) -> Model:
    from treeserve_engine.packed_weights import packed_weights

    return int8_model(_config_of(folder), packed_weights(folder, cache_dir, _log.info), precision, threads)


def int8_model(config: ModelConfig, weights: DecoderWeights, precision: Precision, threads: int) -> Model:
    """A model of int8 weights: the native decoder, or torch's twin of it where that is not built.

    Raises:
        InvalidArgumentError: if the weights do not have the sizes that `config` says.
    """
    if precision.is_native:
        from treeserve_engine.native_model import NativeModel

        try:
            return NativeModel(config, weights, kv_dtype=precision.kv_dtype, threads=threads)
        except ValueError as error:
            raise InvalidArgumentError("model", f"the native decoder refuses it: {error}") from error

    import torch

    from treeserve_engine.model import LlamaModel

    _log.warning("the native decoder is not built here: torch computes int8 in its place, which is much slower")
    torch.set_num_threads(threads)
    return LlamaModel.from_int8(config, weights, getattr(torch, precision.kv_dtype))


def _config_of(folder: Path) -> ModelConfig:
    """The model's configuration; the log says if its context is cut short."""
    config = load_config(folder)
    if config.max_position_embeddings == config.sliding_window:
        _log.info("the context ends where the model's attention window does", tokens=config.sliding_window)
    return config
