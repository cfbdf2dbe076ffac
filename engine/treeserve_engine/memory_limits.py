"""How much memory this process may take: what the machine has left, and what its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError


def available_bytes(device: str = "cpu", root: Path = Path("/")) -> int:
    """Memory that this process may take, what it has taken already included.

    On a CPU: what the machine can give without swapping, and what is left of the limits of the process's control
    groups (version 2 or 1), all of which hold. File pages that can be dropped count as free. On a GPU: its free memory.

    Args:
        device: torch's name of it.
        root: where /proc and /sys are, for tests.

    Raises:
        InvalidArgumentError: if there is no such GPU.
    """
    if device.startswith("cuda"):
        import torch

        try:
            return int(torch.cuda.mem_get_info(torch.device(device))[0])
        except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
            raise InvalidArgumentError("device", f"{device} cannot be used: {error}") from error
    free = [_machine_free(root), *_group_free(root)]
    return min(free) + resident_bytes(root)


def resident_bytes(root: Path = Path("/")) -> int:
    """What this process holds in memory now, without file pages."""
    fields = (root / "proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _machine_free(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable")


def _group_free(root: Path) -> Iterator[int]:
    """What each limited control group above this process has left."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = (
                "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"
            )  # fmt: skip
        else:
            continue
        folder = mount / group.lstrip("/")
        if not folder.is_dir():  # inside a container its own group is the mount's root
            folder = mount
        while True:
            yield from _left(folder, names)
            if folder == mount:
                break
            folder = folder.parent


def _left(folder: Path, names: tuple[str, str, str, str]) -> Iterator[int]:
    limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
    if not limit.isdigit() or not used.isdigit():  # "max", or the root group, which has no limit
        return
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    droppable = sum(int(stat.get(name, 0)) for name in names[2:])
    yield max(0, int(limit) - max(0, int(used) - droppable))


def _read(path: Path) -> str:
    """A file's text; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
