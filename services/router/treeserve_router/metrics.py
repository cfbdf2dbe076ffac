"""The router's Prometheus metrics. Names follow OpenTelemetry's gen_ai conventions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial

from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import OverloadedError, UnavailableError
from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_router.autoscaling import Autoscaler, Role
from treeserve_router.queue import RequestQueue

# Buckets as OpenTelemetry's semantic conventions advise, seconds.
_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REDIS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class RouterMetrics:
    """Everything the router counts.

    Args:
        registry: where the metrics are registered; one router each.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a request's arrival to its last token.",
            ["service_class", "outcome"],
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            ["service_class"],
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token after the first.",
            ["service_class"],
            buckets=_TPOT_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = _counter("treeserve_router_prompt_tokens", "Prompt tokens admitted.", registry)
        self.output_tokens = _counter("treeserve_router_output_tokens", "Tokens shown to clients.", registry)
        self._output_per_acceptance = Counter(
            "treeserve_router_output_tokens_per_acceptance",
            "Tokens shown to clients, by the request's acceptance rule and whether that is lossy.",
            ["acceptance", "lossy"],
            registry=registry,
        )
        self._rejections = Counter(
            "treeserve_router_rejections", "Requests that failed, by the kind of error.", ["reason"], registry=registry
        )
        self._refusals = Counter(
            "treeserve_router_refusals",
            "Requests refused because something is full: a bound of the queue, a quota, what targets leave.",
            ["cause"],
            registry=registry,
        )
        self.replays = _counter("treeserve_router_replays", "Generations continued on another link.", registry)
        self.hedges = Counter(
            "treeserve_router_hedges",
            "Generations run on a second verifier because the first was silent, and how that ended.",
            ["outcome"],
            registry=registry,
        )
        self.moves = _counter("treeserve_router_moves", "Generations moved off a draining verifier.", registry)
        self.redis_s = Histogram(
            "treeserve_router_redis_seconds", "Time of a call to Redis.", buckets=_REDIS_BUCKETS, registry=registry
        )
        self.active = Gauge("treeserve_router_active_requests", "Requests in progress.", registry=registry)

    def watch(self, queue: RequestQueue, num_verifiers: Callable[[], int]) -> None:
        """Report the queue's depth and age per class, and the connected verifiers, whenever metrics are read."""
        depth = Gauge("treeserve_router_queue_depth", "Waiting requests.", ["service_class"], registry=self.registry)
        age = Gauge(
            "treeserve_router_queue_age_seconds",
            "How long the oldest waiting request has waited.",
            ["service_class"],
            registry=self.registry,
        )
        for service_class in ServiceClass:
            depth.labels(_label(service_class)).set_function(partial(queue.depth, service_class))
            age.labels(_label(service_class)).set_function(partial(queue.age_s, service_class))
        Gauge("treeserve_router_verifiers", "Connected verifiers.", registry=self.registry).set_function(num_verifiers)

    def watch_wanted(self, autoscaler: Autoscaler) -> None:
        """Report the replicas that roles want when metrics are read, and nothing of a role where it is not known."""
        self.registry.register(_WantedReplicas(autoscaler))

    def shown(self, num_tokens: int, rule: AcceptanceRule) -> None:
        """Count tokens shown to a client whose request is under this acceptance rule."""
        self.output_tokens.inc(num_tokens)
        self._output_per_acceptance.labels(rule.label, str(rule.is_lossy).lower()).inc(num_tokens)

    def rejected(self, error: BaseException) -> None:
        """Count a request that failed."""
        self._rejections.labels(type(error).__name__.removesuffix("Error")).inc()
        if isinstance(error, OverloadedError):
            self._refusals.labels(error.cause).inc()


class _WantedReplicas(Collector):
    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    def collect(self) -> Iterable[Metric]:
        """What is known now."""
        family = GaugeMetricFamily(
            "treeserve_router_wanted_replicas",
            "Replicas that the load wants, of all routers together.",
            labels=["role"],
        )
        for role in Role:
            with contextlib.suppress(UnavailableError):
                family.add_metric([role], self._autoscaler.wanted(role))
        yield family


class RequestMeter:
    """Times one request, from its arrival on.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: RouterMetrics, limits: SequenceLimits, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._service_class = _label(limits.service_class)
        self._acceptance = limits.acceptance.rule
        self._clock = clock
        self._arrived = clock()
        self._first_token: float | None = None
        self._num_tokens = 0
        metrics.active.inc()

    def resolved(self, limits: SequenceLimits) -> None:
        """What holds for the request: its policy's, or those it had before it was taken up."""
        self._service_class = _label(limits.service_class)
        self._acceptance = limits.acceptance.rule

    def admitted(self, prompt_tokens: int) -> None:
        """Count the prompt."""
        self._metrics.prompt_tokens.inc(prompt_tokens)

    def tokens(self, num_tokens: int, span: Span) -> None:
        """Count tokens shown to the client."""
        if self._first_token is None:
            self._first_token = self._clock()
            span.add_event("first_token")
            self._metrics.ttft.labels(self._service_class).observe(self._first_token - self._arrived)
        self._num_tokens += num_tokens
        self._metrics.shown(num_tokens, self._acceptance)

    def ended(self, outcome: str) -> None:
        """Observe the whole request; call once."""
        now = self._clock()
        self._metrics.active.dec()
        self._metrics.duration.labels(self._service_class, outcome).observe(now - self._arrived)
        if self._first_token is not None and self._num_tokens > 1:
            per_token = (now - self._first_token) / (self._num_tokens - 1)
            self._metrics.tpot.labels(self._service_class).observe(per_token)


def _counter(name: str, documentation: str, registry: CollectorRegistry) -> Counter:
    return Counter(name, documentation, registry=registry)


def _label(service_class: ServiceClass) -> str:
    return service_class.name.lower()
