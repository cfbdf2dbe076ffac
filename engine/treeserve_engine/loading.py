"""Chooses who computes a model, and loads it. What is not used is not imported: int8 runs without torch."""

from __future__ import annotations

from pathlib import Path

from treeserve_engine.config import load_config
from treeserve_engine.interface import Model


def load_model(folder: Path, *, dtype: str, device: str, threads: int) -> Model:
    """Load a Hugging Face folder in the calling thread, which must also run it.

    Args:
        folder: holds config.json and safetensors weights.
        dtype: "float32" or "bfloat16".
        device: torch's name of it.
        threads: CPU threads of a forward pass.

    Raises:
        InvalidArgumentError: if the model or the combination is not supported.
    """
    import torch

    from treeserve_engine.model import LlamaModel

    torch.set_num_threads(threads)
    return LlamaModel.load(folder, load_config(folder), getattr(torch, dtype), torch.device(device))
