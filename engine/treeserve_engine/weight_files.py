"""The safetensors files of a checkpoint, and what their headers say; reads no weights and needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, each once, sorted.

    Raises:
        InvalidArgumentError: if there are none or one that the index names is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(folder / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError("model", f"{index} is broken: {error!r}") from error
    else:
        files = [folder / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise InvalidArgumentError("model", f"{folder} lacks {file.name} (only safetensors weights are supported)")
    return files


def parameter_count(folder: Path) -> int:
    """Elements of all tensors of a checkpoint.

    Raises:
        InvalidArgumentError: if a file is missing or damaged.
    """
    return sum(_parameters_in(path) for path in weight_files(folder))


def _parameters_in(path: Path) -> int:
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise InvalidArgumentError("model", f"{path} is damaged: {error!r}") from error
