"""What the verifier counts, under the names that existing dashboards know."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.tree import TokenTree
from treeserve_verifier.decode_run import FinishedRun, stats_of
from treeserve_verifier.executor import ExecutedStep
from treeserve_verifier.sequence import Sequence

_STEP_BUCKETS_S = (
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.035,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
)
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
        self.emitted_per_acceptance = Counter(
            "treeserve_verifier_emitted_tokens_per_acceptance",
            "Tokens emitted, by the request's acceptance rule and whether that is lossy",
            ["acceptance", "lossy"],
            registry=registry,
        )
        self.prefill_tokens = Counter("treeserve_verifier_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.rejected_proposals = Counter(
            "treeserve_verifier_rejected_proposals", "Proposals refused, by status code", ["code"], registry=registry
        )
        self.tree_waits = Counter("treeserve_verifier_tree_waits", "Steps that waited for a tree", registry=registry)
        self.tree_wait_seconds = Counter(
            "treeserve_verifier_tree_wait_seconds", "Time that steps waited for trees", registry=registry
        )
        self.step_duration = Histogram(
            "treeserve_verifier_step_duration_seconds",
            "Forward pass of one step",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.emission_gap = Histogram(
            "treeserve_verifier_emission_gap_seconds",
            "Time from one emission of a sequence to its next; tokens that leave together have none between them",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.targets = Counter(
            "treeserve_verifier_targets",
            "Ends of sequences, by class, target (ttft or tpot) and whether it was met",
            ["service_class", "target", "met"],
            registry=registry,
        )
        self.cached_tokens = Counter(
            "treeserve_verifier_cached_tokens", "Prompt tokens whose KV was there already", registry=registry
        )
        self.step_rows = Histogram(
            "treeserve_verifier_step_rows", "Rows of one step", buckets=_ROW_BUCKETS, registry=registry
        )
        self.registry = registry

    def count(self, step: ExecutedStep, source_names: Callable[[int], list[str]]) -> None:
        """Count a finished step.

        Args:
            source_names: names of the draft sources in a node's mask.
        """
        self.step_duration.observe(step.forward_ms / 1e3)
        self.step_rows.observe(step.plan.rows)
        self.prefill_tokens.inc(step.plan.prefill_rows)
        for result in step.results:
            if result.outcome is not None and result.planned.tree is not None:
                rule = result.planned.sequence.submission.limits.acceptance.rule
                self._count_outcome(result.outcome, result.planned.tree, rule, source_names)

    def count_run(self, run: FinishedRun, source_names: Callable[[int], list[str]]) -> None:
        """Count the steps of a run.

        Args:
            source_names: names of the draft sources with a bit in the masks of the drafter's trees.
        """
        for step in run.ran.steps:
            self.step_duration.observe(step.forward_ms / 1e3)
            self.step_rows.observe(step.rows)
            self.prefill_tokens.inc(step.prefill_rows)
        for sequence, ran in zip(run.plan.sequences, run.ran.sequences, strict=True):
            rule = sequence.submission.limits.acceptance.rule
            self._count_emitted(len(ran.token_ids), rule)
            self.drafts.inc(sum(record.verified > 0 for record in ran.records))
            stats = stats_of(ran)
            self.draft_tokens.inc(stats.drafted)
            self.accepted_tokens.inc(stats.accepted)
            for depth, accepted in enumerate(stats.accepted_per_depth):
                self.accepted_per_pos.labels(depth).inc(accepted)
        for bit, accepted in enumerate(run.ran.accepted_by_source):
            if accepted:
                for source in source_names(bit):
                    self.accepted_per_source.labels(source).inc(accepted)

    def count_gaps(self, gaps_s: Iterable[float]) -> None:
        """Count times between emissions."""
        for gap_s in gaps_s:
            self.emission_gap.observe(gap_s)

    def count_end(self, sequence: Sequence) -> None:
        """Count what a sequence that leaves was spared, and whether it got what it was promised."""
        self.cached_tokens.inc(sequence.cached_tokens or 0)
        service_class = sequence.submission.limits.service_class.name.lower()
        met_ttft = None if sequence.submission.generated_token_ids else sequence.promise.met_ttft  # else met elsewhere
        for target, met in (("ttft", met_ttft), ("tpot", sequence.promise.met_tpot)):
            if met is not None:
                self.targets.labels(service_class, target, str(met).lower()).inc()

    def _count_outcome(
        self, outcome: VerifyOutcome, tree: TokenTree, rule: AcceptanceRule, source_names: Callable[[int], list[str]]
    ) -> None:
        self._count_emitted(len(outcome.token_ids), rule)
        if len(tree) == 1:
            return
        self.drafts.inc()
        self.draft_tokens.inc(len(tree) - 1)
        self.accepted_tokens.inc(len(outcome.accepted_nodes))
        for depth, node in enumerate(outcome.accepted_nodes):
            self.accepted_per_pos.labels(depth).inc()
            if tree.source_masks is not None:
                for source in source_names(tree.source_masks[node]):
                    self.accepted_per_source.labels(source).inc()

    def _count_emitted(self, tokens: int, rule: AcceptanceRule) -> None:
        self.emitted_tokens.inc(tokens)
        self.emitted_per_acceptance.labels(rule.label, str(rule.is_lossy).lower()).inc(tokens)

    def watch_total(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Export a count kept elsewhere, read when scraped."""
        self.registry.register(_Total(name, documentation, value))

    def watch(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Export a gauge that is read when scraped."""
        Gauge(name, documentation, registry=self.registry).set_function(value)
