"""Credit flow control of the bidirectional streams: gRPC's own windows let megabytes pile up before a write blocks."""

from __future__ import annotations


class Credits:
    """The sender's side: frames it may still send."""

    def __init__(self, initial: int = 0) -> None:
        self._available = initial

    @property
    def available(self) -> int:
        """Frames that may be sent now."""
        return self._available

    def grant(self, frames: int) -> None:
        """Add credit the peer sent."""
        if frames < 0:
            raise ValueError(f"credit of {frames} frames")
        self._available += frames

    def try_take(self) -> bool:
        """Spend the credit of one frame; False if there is none, and then nothing may be sent."""
        if self._available == 0:
            return False
        self._available -= 1
        return True


class CreditWindow:
    """The receiver's side: how much credit to give back, coalesced so that few frames carry credit alone.

    The peer starts with `size` frames. Half a window's worth is returned at once, so a steady reader never starves the
    peer and grants cost one frame in `size / 2`.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a window of {size} frames lets nothing through")
        self.size = size
        self._consumed = 0

    def consume(self) -> int:
        """Count one processed frame; returns the frames to grant now, mostly 0."""
        self._consumed += 1
        if 2 * self._consumed < self.size:
            return 0
        frames, self._consumed = self._consumed, 0
        return frames
