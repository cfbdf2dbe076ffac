"""A GGUF file's metadata, by key and checked type, and its tensors. Knows nothing of any architecture."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize

from treeserve_core.errors import InvalidArgumentError


class GgufFile:
    """One .gguf file, memory-mapped.

    Raises:
        InvalidArgumentError: if the file is not a readable GGUF.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise InvalidArgumentError("model", f"{path} is not a readable GGUF file: {error!r}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python objects, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        """A metadata value that must be there; InvalidArgumentError if it is not."""
        value = self.get(key)
        if value is None:
            raise InvalidArgumentError("model", f"the GGUF file lacks {key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer that must be there unless there is a default; InvalidArgumentError otherwise."""
        value = self.required(key) if default is None else self.get(key, default)
        if not isinstance(value, int):
            raise InvalidArgumentError("model", f"{key} is {value!r}; one integer is supported")
        return value

    @property
    def architecture(self) -> str:
        """The prefix of the model's own keys, for example "llama"."""
        return str(self.required("general.architecture"))

    @property
    def tensor_names(self) -> Collection[str]:
        """Names in file order."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, rows first as numpy has it; InvalidArgumentError if there is no such tensor."""
        if name not in self._tensors:
            raise InvalidArgumentError("model", f"the GGUF file lacks the tensor {name}")
        return tuple(int(n) for n in reversed(self._tensors[name].shape))  # GGUF stores the columns first

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values, dequantised.

        Raises:
            InvalidArgumentError: for a quantisation that the gguf package cannot read.
        """
        shape = self.shape(name)
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InvalidArgumentError("model", f"tensor {name} is {tensor.tensor_type.name}: {error}") from error
        result: npt.NDArray[np.float32] = np.ascontiguousarray(values, dtype=np.float32).reshape(shape)
        return result
