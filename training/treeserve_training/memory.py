"""Keeps freed memory in the process, for work that allocates the same tensors again in every step."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Tell glibc's allocator not to give memory back to the system.

    By default large tensors are new pages every time, and a training step spends as long on making them as on half of
    its arithmetic. Does nothing where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, _LARGEST)
