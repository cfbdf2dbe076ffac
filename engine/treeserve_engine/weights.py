"""A checkpoint's tensors, memory-mapped from one safetensors file or from the shards its index names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.weight_files import weight_files


class _Tensors(Mapping[str, torch.Tensor]):
    """Tensors by name. A tensor is read from disk when it is asked for."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    """All tensors of a checkpoint by name, on the CPU in their stored dtype; read when asked for, not kept.

    Raises:
        InvalidArgumentError: if a file is missing or damaged.
    """
    files: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise InvalidArgumentError("model", f"{path} is damaged: {error}") from error
        files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]
    return _Tensors(files)
