"""How long to wait before connecting again."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waits that double from `first_s` to `longest_s`, with jitter so that peers do not return all at once."""

    first_s: float = 0.1
    longest_s: float = 0.5

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """The wait after so many failures in a row, one at least."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 16)) * rng.uniform(0.5, 1.0)
