"""The device under test: how to wait for it and time it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Device:
    """A CUDA device, or the CPU with Triton's interpreter, where times mean nothing.

    Attributes:
        name: torch's name of it.
    """

    name: str

    @property
    def torch(self) -> torch.device:
        """As torch wants it."""
        return torch.device(self.name)

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.torch.type == "cuda"

    def median_ms(self, call: Callable[[], object]) -> float:
        """Median duration of a call that leaves its work on the device, milliseconds; one call on a CPU."""
        if self.is_cuda:
            median: float = triton.testing.do_bench(call, return_mode="median")
            return median
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def median_wall_ms(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Median duration of a call and all it left on the device, the host's part included, milliseconds."""
        if not self.is_cuda:
            return self.median_ms(call)
        call()
        times: list[float] = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[repeats // 2]

    def describe(self) -> dict[str, str]:
        """What results depend on."""
        machine = {
            "device": self.name,
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        if self.is_cuda:
            machine |= {
                "gpu": torch.cuda.get_device_name(),
                "capability": ".".join(map(str, torch.cuda.get_device_capability())),
                "cuda": str(torch.version.cuda),
            }
        return machine
