"""Memory of huge pages, for what is read from one end to the other again and again.

An ordinary page is 4 KiB: int8 weights of 135 MB take 33,000 of them, more than a processor remembers the places of,
and in a virtual machine finding one again costs several accesses to memory. docs/architecture.md has what pages of
2 MiB save.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

_HUGE_BYTES = 2 << 20


def huge_buffer(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory of this process alone, uint8[num_bytes], that begins at a huge page.

    Of ordinary pages where the system has no others to give.

    Raises:
        OSError: if there is not enough memory.
    """
    # Private: huge pages of shared memory are a setting of their own, off by default.
    memory = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_BYTES
    return whole[start : start + num_bytes]
