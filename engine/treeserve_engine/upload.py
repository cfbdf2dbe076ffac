"""Copies the many small arrays of a step to a device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Arrays = Sequence[npt.NDArray[Any]]

# What the kernels assume of a tensor's address, as torch's own allocations have it.
_ALIGNMENT = 16


def pack(arrays: Arrays, device: torch.device) -> torch.Tensor:
    """The arrays' bytes one after the other, each aligned, on the host: uint8, page-locked if `device` is a GPU."""
    offsets = _offsets(arrays)
    packed = torch.zeros(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Arrays) -> tuple[torch.Tensor, ...]:
    """Views of what `pack` made, wherever it was copied to, with the dtypes and shapes of `arrays`."""
    return tuple(
        packed[offset : offset + array.nbytes].view(torch.from_numpy(array.reshape(-1)[:0]).dtype).view(array.shape)
        for array, offset in zip(arrays, _offsets(arrays), strict=False)
    )


def upload(arrays: Arrays, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The arrays as tensors on a device: views of one copy, for which the host does not wait."""
    return unpack(pack(arrays, device).to(device, non_blocking=True), arrays)


def _offsets(arrays: Arrays) -> list[int]:
    """Where each array begins, and the end of all."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    offsets: list[int] = np.cumsum([0, *sizes]).tolist()
    return offsets
