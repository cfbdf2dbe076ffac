"""KV writes and moves against their torch twins, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.device import Device
from treeserve_kernels.kv import move_kv, write_kv
from treeserve_kernels.triton.kv import move_kv_triton, write_kv_triton


@dataclass(frozen=True)
class KvResult:
    """Whether both kernels leave their twins' bits, and median times in milliseconds."""

    dtype: str
    num_slots: int
    agrees: bool
    write_ms: float
    write_twin_ms: float
    move_ms: float
    move_twin_ms: float

    def line(self) -> str:
        """For reading along."""
        return (
            f"{'ok ' if self.agrees else 'BAD'} KV {self.dtype:<9} ms: write {self.write_ms:.3f} (torch "
            f"{self.write_twin_ms:.3f}), move {self.move_ms:.3f} (torch {self.move_twin_ms:.3f})"
        )


def check_kv(device: Device, dtype: torch.dtype, num_slots: int, num_heads: int, head_dim: int) -> KvResult:
    """Writes a quarter of the slots, then moves half of them by one: each source is the next move's destination."""
    cache = torch.randn(num_slots, num_heads, head_dim, device=device.name).to(dtype)
    slots = torch.randperm(num_slots, device=device.name)[: num_slots // 4]
    values = torch.randn(len(slots), num_heads, head_dim, device=device.name).to(dtype)
    src = torch.arange(1, num_slots // 2, device=device.name)
    twin = cache.clone()
    write_kv(twin, slots, values)
    write_kv_triton(cache, slots, values)
    agrees = torch.equal(cache, twin)
    move_kv(twin, src, src - 1)
    move_kv_triton(cache, src, src - 1)
    return KvResult(
        dtype=str(dtype).removeprefix("torch."),
        num_slots=num_slots,
        agrees=agrees and torch.equal(cache, twin),
        write_ms=device.median_ms(lambda: write_kv_triton(cache, slots, values)),
        write_twin_ms=device.median_ms(lambda: write_kv(twin, slots, values)),
        move_ms=device.median_ms(lambda: move_kv_triton(cache, src, src - 1)),
        move_twin_ms=device.median_ms(lambda: move_kv(twin, src, src - 1)),
    )
