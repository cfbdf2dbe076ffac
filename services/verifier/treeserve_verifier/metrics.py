"""What the verifier counts, under the names that existing dashboards know."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_STEP_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)


class _Total(Collector):
    def __init__(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        self._describe = (name, documentation)
        self._value = value

    def collect(self) -> Iterable[Metric]:
        """The count now."""
        return [CounterMetricFamily(*self._describe, value=self._value())]


class VerifierMetrics:
    """All metrics of one verifier process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.drafts = Counter("spec_decode_num_drafts", "Verify steps that had draft nodes", registry=registry)
        self.draft_tokens = Counter("spec_decode_num_draft_tokens", "Draft nodes verified", registry=registry)
        self.accepted_tokens = Counter("spec_decode_num_accepted_tokens", "Draft nodes accepted", registry=registry)
        self.accepted_per_pos = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft nodes accepted, by depth", ["position"], registry=registry
        )
        self.accepted_per_source = Counter(
            "treeserve_verifier_accepted_tokens_per_source",
            "Draft nodes accepted, by source (a node counts for each that drew it)",
            ["source"],
            registry=registry,
        )
        self.emitted_tokens = Counter("treeserve_verifier_emitted_tokens", "Tokens emitted", registry=registry)
        self.prefill_tokens = Counter("treeserve_verifier_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.rejected_proposals = Counter(
            "treeserve_verifier_rejected_proposals", "Proposals refused, by status code", ["code"], registry=registry
        )
        self.step_duration = Histogram(
            "treeserve_verifier_step_duration_seconds",
            "Forward pass of one step",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.step_rows = Histogram(
            "treeserve_verifier_step_rows", "Rows of one step", buckets=_ROW_BUCKETS, registry=registry
        )
        self._registry = registry

    def watch_total(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Export a count kept elsewhere, read when scraped."""
        self._registry.register(_Total(name, documentation, value))

    def watch(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Export a gauge that is read when scraped."""
        Gauge(name, documentation, registry=self._registry).set_function(value)
