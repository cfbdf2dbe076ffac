"""How long a verifier's steps take, from its own histogram."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peers.client import HOST
from benchmarks.peers.peer import PeerError

_STEP_METRIC = "treeserve_verifier_step_duration_seconds"

Buckets = Mapping[float, float]  # upper bound in seconds -> how many took at most that


def scrape(port: int) -> Buckets:
    """The cumulative histogram of step durations now. Raises PeerError."""
    try:
        with httpx.Client(trust_env=False) as client:
            text = client.get(f"http://{HOST}:{port}/metrics").raise_for_status().text
    except httpx.HTTPError as error:
        raise PeerError(f"no metrics of the verifier: {error}") from error
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{_STEP_METRIC}_bucket"
    }


def step_quantile_ms(before: Buckets, after: Buckets, quantile: float) -> float | None:
    """A quantile of the steps between two scrapes, interpolated inside its bucket; None if there was no step.

    A quantile in the last bucket, which has no upper bound, is that bucket's lower bound.
    """
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= quantile * total:
            if bound == float("inf"):
                return 1e3 * lower
            share = (quantile * total - below) / (count - below) if count > below else 1.0
            return 1e3 * (lower + share * (bound - lower))
        lower, below = bound, count
    return 1e3 * lower
