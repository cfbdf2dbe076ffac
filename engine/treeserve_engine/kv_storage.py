"""The bytes of the KV tiers: blocks in host memory and in a file on disk, copied from and to the KV cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.interface import Kv
from treeserve_engine.kv_tiers import POOL, BlockCopy, Place, TierSize

_TRIALS = 3

Block = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TierBytes:
    """How much evicted KV to keep, in bytes; 0 leaves a tier out.

    Attributes:
        host: in this process's memory, taken as it fills.
        disk: in a file of that size in `disk_folder`. It has no name there and is gone when the process ends.
    """

    host: int = 0
    disk: int = 0
    disk_folder: Path = Path()


class _Tier(Protocol):
    slots: int

    def read(self, slot: int) -> Block:
        """The block in a slot, valid until the next call."""

    def write(self, slot: int, fill: Callable[[Block], object]) -> None:
        """Have a slot filled: `fill` writes all of a block."""

    def forget_pages(self) -> None:
        """Have the next read take as long as one of a block that was not used for long."""


class _HostTier:
    """Memory that is taken as it fills, while steps wait: of ordinary pages, as huge ones take far longer to find."""

    def __init__(self, slots: int, block_nbytes: int) -> None:
        self.slots = slots
        memory = mmap.mmap(-1, slots * block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._blocks = np.frombuffer(memory, np.uint8).reshape(slots, block_nbytes)

    def read(self, slot: int) -> Block:
        block: Block = self._blocks[slot]
        return block

    def write(self, slot: int, fill: Callable[[Block], object]) -> None:
        fill(self._blocks[slot])

    def forget_pages(self) -> None:
        pass


class _DiskTier:
    def __init__(self, slots: int, block_nbytes: int, folder: Path) -> None:
        self.slots = slots
        self._buffer = np.empty(block_nbytes, np.uint8)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, slots * block_nbytes)  # a full disk is seen now, not later
                self._file = os.dup(file.fileno())
        except OSError as error:
            reason = f"cannot hold {slots * block_nbytes} bytes in {folder}: {error.strerror}"
            raise InvalidArgumentError("kv_disk_folder", reason) from error
        weakref.finalize(self, os.close, self._file)

    def read(self, slot: int) -> Block:
        if os.preadv(self._file, [self._buffer.data], slot * len(self._buffer)) != len(self._buffer):
            raise OSError("the KV file is cut short")
        return self._buffer

    def write(self, slot: int, fill: Callable[[Block], object]) -> None:
        fill(self._buffer)
        if os.pwritev(self._file, [self._buffer.data], slot * len(self._buffer)) != len(self._buffer):
            raise OSError("a block was written in part")

    def forget_pages(self) -> None:
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


class TierStorage:
    """The tiers of one KV cache.

    Raises:
        InvalidArgumentError: if the file cannot be made; it names the setting.
    """

    def __init__(self, kv: Kv, tiers: TierBytes) -> None:
        self._kv = kv
        host, disk = tiers.host // kv.block_nbytes, tiers.disk // kv.block_nbytes
        self._tiers: list[_Tier] = []
        if host:
            self._tiers.append(_HostTier(host, kv.block_nbytes))
        if disk:
            self._tiers.append(_DiskTier(disk, kv.block_nbytes, tiers.disk_folder))

    def measure(self) -> list[TierSize]:
        """Size of each tier, and what bringing a block back takes: one is, into block 0 of the KV cache."""
        return [TierSize(tier.slots, self._restore_ms(tier)) for tier in self._tiers]

    def copy(self, copy: BlockCopy) -> None:
        """Copy a block from the KV cache, to it, or between tiers.

        Raises:
            OSError: if the disk fails. Nothing can be said of the destination then.
        """
        if copy.dst.tier == POOL:
            self._kv.load(copy.dst.slot, self._read(copy.src))
        else:
            self._tiers[copy.dst.tier - 1].write(copy.dst.slot, partial(self._save, copy.src))

    def _save(self, src: Place, block: Block) -> None:
        if src.tier == POOL:
            self._kv.save(src.slot, block)
        else:
            np.copyto(block, self._read(src))

    def _read(self, src: Place) -> Block:
        return self._tiers[src.tier - 1].read(src.slot)

    def _restore_ms(self, tier: _Tier) -> float:
        tier.write(0, partial(self._kv.save, 0))
        times = []
        for _ in range(_TRIALS):
            tier.forget_pages()
            start = time.perf_counter()
            self._kv.load(0, tier.read(0))
            times.append(time.perf_counter() - start)
        return sorted(times)[_TRIALS // 2] * 1e3
