"""Whether logits are looked through natively."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def native_sampling() -> ModuleType | None:
    """What does it (treeserve_kernels.cpu.sampling), unless the library is missing."""
    from treeserve_kernels.cpu import library, sampling

    return sampling if library.is_built() else None
