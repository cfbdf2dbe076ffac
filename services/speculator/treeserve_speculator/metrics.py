"""What a speculator counts. One object per process; updates are thread-safe."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "treeserve_speculator_"
_DRAFT_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class SourceCounters:
    """One source's counters, looked up once: see their help texts."""

    seconds: Counter
    nodes: Counter
    visits: Counter
    right: Counter


class SpeculatorMetrics:
    """Counters, gauges and histograms of drafting."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self.trees = counter("trees", "Trees drafted, those without a node included")
        self.empty_trees = counter("empty_trees", "Trees in which no source had an idea")
        self.nodes = counter("nodes", "Nodes drafted, by source; a node of two sources counts for both", "source")
        self.source_seconds = counter("source_seconds", "Time spent in a draft source, for trees and commits", "source")
        self.visits = counter(
            "visits", "Nodes on the way of committed tokens below which a source had proposed something", "source"
        )
        self.right = counter("right", "Visits where what the source had proposed was right", "source")
        self.late_trees = counter("late_trees", "Trees dropped here because the sequence had moved on")
        self.rejections = counter("rejections", "Proposals the verifier refused, by status code", "code")
        self.source_failures = counter("source_failures", "Sequences a source failed on", "source")
        self.source_faults = counter(
            "source_faults", "What a source that is not built in got wrong, by reason", "source", "reason"
        )
        self.protocol_errors = counter("protocol_errors", "Sequences dropped because an update made no sense")
        self.damaged_features = counter(
            "damaged_features", "Updates whose hidden states came damaged: their sequences go on without them"
        )
        self.draft_seconds = Histogram(
            _PREFIX + "draft_seconds", "Time to draft one batch of trees", buckets=_DRAFT_SECONDS, registry=registry
        )
        self.sequences = Gauge(_PREFIX + "sequences", "Sequences assigned now", registry=registry)
        self.streams = Gauge(_PREFIX + "streams", "Verifiers connected now", registry=registry)

    def of_source(self, name: str) -> SourceCounters:
        """What is counted for each tree."""
        counters = (self.source_seconds, self.nodes, self.visits, self.right)
        return SourceCounters(*(counter.labels(name) for counter in counters))
