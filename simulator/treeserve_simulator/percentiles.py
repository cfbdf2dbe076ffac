"""Percentiles of latencies, of which some requests have none."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PERCENTILES = (50, 95, 99)


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """p50, p95 and p99 of the values that are there; None each if there are none."""
    there = [value for value in values if value is not None]
    return {f"p{q}": float(np.percentile(there, q)) if there else None for q in PERCENTILES}
