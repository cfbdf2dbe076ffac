"""Which evicted KV blocks lie in which tier below the pool, host memory and then disk; moves no byte itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from treeserve_core.prefix import PrefixHash

POOL = 0  # the tier that forward passes read


@dataclass(frozen=True)
class Place:
    """One block's room: tier 0 is the KV cache itself, 1 the first tier below it, and so on."""

    tier: int
    slot: int


@dataclass(frozen=True)
class BlockCopy:
    """A block to copy from one place to another."""

    src: Place
    dst: Place


@dataclass(frozen=True)
class TierSize:
    """One tier below the pool.

    Attributes:
        slots: blocks it holds.
        restore_ms: what bringing a block back into the pool takes.
    """

    slots: int
    restore_ms: float


class KvTiers:
    """Names of the blocks in each tier, least recently used first.

    An evicted block goes to the first tier; what that one has no room for any more goes to the next, and from the last
    one it is forgotten. A block that is brought back stays in its tier too, so evicting it again costs nothing.

    All that is decided here becomes a list of copies. Whoever owns the bytes makes them in this order, before anything
    else is written to the pool: then each source still holds what it held when the copy was decided.
    """

    def __init__(self, sizes: Sequence[TierSize]) -> None:
        self._sizes = [size for size in sizes if size.slots > 0]
        self._slots: list[OrderedDict[PrefixHash, int]] = [OrderedDict() for _ in self._sizes]
        self._unused = [list(range(size.slots - 1, -1, -1)) for size in self._sizes]
        self._copies: list[BlockCopy] = []
        self.restored = 0  # blocks brought back so far

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in each tier."""
        return tuple(len(slots) for slots in self._slots)

    def restore_ms(self, name: PrefixHash) -> float | None:
        """What bringing this prefix's last block back takes; None if no tier has it."""
        tier = self._tier_of(name)
        return None if tier is None else self._sizes[tier].restore_ms

    def touch(self, name: PrefixHash) -> None:
        """Make a block of a tier the most recently used one."""
        tier = self._tier_of(name)
        if tier is not None:
            self._slots[tier].move_to_end(name)

    def restore(self, name: PrefixHash, block: int) -> bool:
        """Bring a block back into this block of the pool. False if no tier has it any more."""
        tier = self._tier_of(name)
        if tier is None:
            return False
        self._copies.append(BlockCopy(Place(tier + 1, self._slots[tier][name]), Place(POOL, block)))
        self.restored += 1
        return True

    def keep(self, name: PrefixHash, block: int) -> None:
        """Keep what this block of the pool holds; the pool gives the block away."""
        if self._tier_of(name) is None:
            self._put(0, name, Place(POOL, block))
        else:
            self.touch(name)

    def take_copies(self) -> list[BlockCopy]:
        """The copies decided since the last call, in their order."""
        copies, self._copies = self._copies, []
        return copies

    def lose(self, place: Place) -> None:
        """Forget what lies in a slot: copying it there failed."""
        slots = self._slots[place.tier - 1]
        name = next((name for name, slot in slots.items() if slot == place.slot), None)
        if name is not None:
            self._unused[place.tier - 1].append(slots.pop(name))

    def forget(self, name: PrefixHash) -> None:
        """Give the slot of a block away, if a tier has it."""
        tier = self._tier_of(name)
        if tier is not None:
            self._unused[tier].append(self._slots[tier].pop(name))

    def check_integrity(self) -> None:
        """Raise RuntimeError if two blocks share a slot, a slot does not exist, or a prefix lies in two tiers."""
        for size, slots, unused in zip(self._sizes, self._slots, self._unused, strict=True):
            if sorted([*slots.values(), *unused]) != list(range(size.slots)):
                raise RuntimeError(f"{len(slots)} blocks and {len(unused)} free slots in a tier of {size.slots}")
        if len({name for slots in self._slots for name in slots}) != sum(self.blocks):
            raise RuntimeError("a prefix lies in two tiers")

    def _tier_of(self, name: PrefixHash) -> int | None:
        return next((tier for tier, slots in enumerate(self._slots) if name in slots), None)

    def _put(self, tier: int, name: PrefixHash, src: Place) -> None:
        if tier == len(self._sizes):
            return
        slots, unused = self._slots[tier], self._unused[tier]
        if unused:
            slot = unused.pop()
        else:
            victim, slot = slots.popitem(last=False)
            self._put(tier + 1, victim, Place(tier + 1, slot))
        slots[name] = slot
        self._copies.append(BlockCopy(src, Place(tier + 1, slot)))
