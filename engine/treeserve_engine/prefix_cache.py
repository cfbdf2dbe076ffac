"""KV blocks by who holds them and what they hold: shared while in use, reusable until their room is needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from treeserve_core.prefix import PrefixHash
from treeserve_engine.kv_tiers import KvTiers


class BlockPool:
    """Reference counts and prefix names of a KV cache's blocks.

    A block has a name once it is full of committed KV: that of the prefix it ends (`core.prefix`). A named block is
    never written again, so any number of sequences may hold it. When nobody does, it stays findable until its room is
    needed: the least recently used block goes first, those under a lease last.

    Args:
        clock: seconds, monotonic; leases end by it.
        tiers: where evicted blocks go; None forgets them.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float], tiers: KvTiers | None = None) -> None:
        self.total_blocks = num_blocks
        self._clock = clock
        self._tiers = tiers
        self._holders = [0] * num_blocks
        self._leased_until = [0.0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # hold nothing that can be found
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, held by nobody, least recently used first
        self._leased: OrderedDict[int, None] = OrderedDict()  # likewise, under a lease
        self._name_of: dict[int, PrefixHash] = {}
        self._block_of: dict[PrefixHash, int] = {}
        self._lost: set[int] = set()  # still held, though what they should hold did not get there

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + self.reusable_blocks

    @property
    def unleased_blocks(self) -> int:
        """Those of the free blocks that are under no lease, as far as it was noticed that leases ended."""
        return len(self._free) + len(self._idle)

    @property
    def reusable_blocks(self) -> int:
        """Those of them that hold a prefix."""
        return len(self._idle) + len(self._leased)

    def shared(self, names: Sequence[PrefixHash]) -> int:
        """How many of these blocks somebody holds: taking them leaves as many free as before."""
        return sum(1 for name in names if name in self._block_of and self._holders[self._block_of[name]])

    def take(self) -> int:
        """Hold a block to write to. The caller knows that one is free."""
        block = self._free.pop() if self._free else self._evict()
        self._holders[block], self._leased_until[block] = 1, 0.0
        return block

    def reuse(self, names: Sequence[PrefixHash], compute_ms: float) -> list[int]:
        """Hold the blocks of a prefix, as many from the first on as are worth it.

        Args:
            compute_ms: what computing a block takes. A prefix is brought back from tiers as far as that saves time.
        """
        names = names[: self._worth_reusing(names, compute_ms)]
        known = [self._block_of.get(name) for name in names]
        for name, block in zip(names, known, strict=True):  # before any is taken, lest they be evicted for one another
            if block is not None:
                self.hold(block)
            elif self._tiers is not None:
                self._tiers.touch(name)
        blocks: list[int] = []
        for name, block in zip(names, known, strict=True):
            found = self._restore(name) if block is None else block
            if found is None:
                break
            blocks.append(found)
        for block in known[len(blocks) :]:
            if block is not None:
                self.release(block)
        return blocks

    def hold(self, block: int) -> None:
        """Hold a block that holds a prefix."""
        self._holders[block] += 1
        self._idle.pop(block, None)
        self._leased.pop(block, None)

    def release(self, block: int, leased_until: float = 0.0) -> None:
        """Let a held block go. A lease lengthens one that it has."""
        self._holders[block] -= 1
        self._leased_until[block] = max(self._leased_until[block], leased_until)
        if self._holders[block]:
            return
        if block not in self._name_of:
            self._lost.discard(block)
            self._free.append(block)
        elif self._leased_until[block] > self._clock():
            self._leased[block] = None
        else:
            self._idle[block] = None

    def name(self, block: int, name: PrefixHash) -> int:
        """Make a held block findable: it is full and is never written again.

        Returns:
            The block to hold in its place: another one if that prefix has a block already.
        """
        known = self._block_of.get(name)
        if known is None:
            self._name_of[block], self._block_of[name] = name, block
            return block
        self.hold(known)
        self.release(block)
        return known

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def is_named(self, block: int) -> bool:
        """Whether the block holds a prefix, and so may be shared."""
        return block in self._name_of

    def lose(self, block: int) -> None:
        """Forget what a block holds: it did not get there."""
        name = self._name_of.pop(block, None)
        if name is None:
            return
        del self._block_of[name]
        if self._holders[block]:
            self._lost.add(block)
            return
        self._idle.pop(block, None)
        self._leased.pop(block, None)
        self._free.append(block)

    def forget(self, name: PrefixHash) -> None:
        """Let a prefix be found no more, here and in the tiers, unless somebody holds its block."""
        block = self._block_of.get(name)
        if block is not None:
            if self._holders[block]:
                return
            self.lose(block)
        if self._tiers is not None:
            self._tiers.forget(name)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError if a block is lost, counted wrongly or found under a wrong name.

        Args:
            tables: the blocks that each holder holds.
        """
        held = Counter(block for table in tables for block in table)
        everything = [*held, *self._free, *self._idle, *self._leased]
        if sorted(everything) != list(range(self.total_blocks)):
            raise RuntimeError(f"blocks that are not either held or free, once: {_not_once(everything)}")
        wrong = {b: (n, held[b]) for b, n in enumerate(self._holders) if n != held[b]}
        if wrong:
            raise RuntimeError(f"blocks counted wrongly (block: counted, held): {wrong}")
        if self._block_of != {name: block for block, name in self._name_of.items()}:
            raise RuntimeError("names and blocks do not agree")
        nameless = [b for b in (*self._idle, *self._leased) if b not in self._name_of]
        shared = [b for b, n in held.items() if n > 1 and b not in self._name_of and b not in self._lost]
        if nameless or shared or any(b in self._name_of for b in self._free):
            raise RuntimeError(f"reusable or shared without a name, or free with one: {nameless}, {shared}")
        if self._tiers is not None:
            self._tiers.check_integrity()

    def _worth_reusing(self, names: Sequence[PrefixHash], compute_ms: float) -> int:
        """Blocks of the prefix whose reuse saves the most time; the longest of equals."""
        saved = most = 0.0
        length = 0
        for i, name in enumerate(names):
            restore_ms = 0.0 if name in self._block_of else self._restore_ms(name)
            if restore_ms is None:
                break
            saved += compute_ms - restore_ms
            if saved >= most:
                most, length = saved, i + 1
        return length

    def _restore_ms(self, name: PrefixHash) -> float | None:
        return None if self._tiers is None else self._tiers.restore_ms(name)

    def _restore(self, name: PrefixHash) -> int | None:
        """A held block to which the prefix's block is brought back; None without a free block, or if it is gone."""
        if self._tiers is None or not self.free_blocks:
            return None
        block = self.take()
        if not self._tiers.restore(name, block):
            self.release(block)
            return None
        self._name_of[block], self._block_of[name] = name, block
        return block

    def _evict(self) -> int:
        """The reusable block that is missed least, no longer findable here."""
        now = self._clock()
        while self._leased and self._leased_until[next(iter(self._leased))] <= now:
            block, _ = self._leased.popitem(last=False)
            self._idle[block] = None
            self._idle.move_to_end(block, last=False)  # used before all that was released during its lease
        block, _ = (self._idle or self._leased).popitem(last=False)
        name = self._name_of.pop(block)
        del self._block_of[name]
        if self._tiers is not None:
            self._tiers.keep(name, block)
        return block


def _not_once(blocks: Sequence[int]) -> dict[int, int]:
    counts = Counter(blocks)
    return {block: n for block, n in counts.items() if n != 1}
