"""Builds a router from its configuration and runs it until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from treeserve.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from treeserve.keda.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from treeserve_core.identity import ModelIdentity
from treeserve_router.admission import Admission, RouterRequest
from treeserve_router.auth import Keyring
from treeserve_router.autoscaling import Autoscaler
from treeserve_router.config import RouterConfig
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.explain import DecisionLog
from treeserve_router.front_door import FrontDoor, GrpcDoor
from treeserve_router.generation import GenerationParts
from treeserve_router.hedging import Hedger
from treeserve_router.http_app import HttpParts, build_app, build_metrics_app
from treeserve_router.http_server import HttpServer
from treeserve_router.inference_servicer import SERVICE_NAME, InferenceServicer
from treeserve_router.load_watch import LoadWatch
from treeserve_router.metrics import RouterMetrics
from treeserve_router.order import ArrivalOrder, Order, QosOrder
from treeserve_router.pool import VerifierPool
from treeserve_router.queue import RequestQueue, Ticket
from treeserve_router.quotas import Quotas
from treeserve_router.router import Router
from treeserve_router.scaler_servicer import ScalerServicer
from treeserve_router.shared_demand import SharedDemand
from treeserve_router.shared_quotas import SharedQuotas
from treeserve_router.shared_state import SharedState
from treeserve_router.tenants import Tenants
from treeserve_router.verifier_link import VerifierLink, dial
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.discovery import PeerWatch
from treeserve_wire.process import run_service, settle_in
from treeserve_wire.server import ServiceServer
from treeserve_wire.telemetry import setup_tracing
from treeserve_wire.tls import Tls

# Long-lived clients reconnect this often, so that they find new replicas.
_MAX_CONNECTION_AGE_MS = 300_000
# An input of 1 MiB, or as many token ids, and what a resumed request has received already.
_MAX_REQUEST_BYTES = 8 << 20

# What still runs after the drain is told so, and has this long to hear it.
_CUT_S = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Addresses:
    """Where a router listens; `http` and `metrics` are empty if they are off."""

    grpc: str
    http: str
    metrics: str


class RouterProcess:
    """One running router. Built inside the event loop."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, tracer: Tracer, registry: CollectorRegistry) -> None:
        clock = asyncio.get_running_loop().time
        metrics = RouterMetrics(registry)
        tenants = Tenants(config.tenants)
        queue = make_queue(config, tenants, clock)
        self._config = config
        tls = Tls.of(config.tls)
        self._keyring = None if config.api_keys_file is None else Keyring(config.api_keys_file)
        door = FrontDoor(config.service_levels, config.tenant_header, self._keyring, metrics.rejected)
        self._pool = VerifierPool(_link_maker(config, tokenizer, tls))
        self._peers = PeerWatch(config.verifiers)
        decisions = DecisionLog(clock, config.explain_requests, config.router_id)
        self._dispatcher = Dispatcher(
            queue, self._pool, config.verifier_wait_s, clock, policies=config.dispatch_policies, decisions=decisions
        )
        self._shared = SharedState(config, self._pool, metrics.redis_s.observe, clock)
        link = self._shared.link
        self._quotas = Quotas(tenants, SharedQuotas(link, config.router_id) if link is not None else None, clock)
        hedger = Hedger(self._dispatcher, metrics, config.stall_timeout_s, config.max_hedges, clock)

        def charge(request: RouterRequest, num_tokens: int) -> None:
            queue.charge(request, num_tokens)
            self._quotas.charge(request.tenant, num_tokens)

        self._router = router = Router(
            Admission(tokenizer, config.model_name),
            self._pool,
            GenerationParts(self._dispatcher, hedger, tokenizer, metrics, config.max_replays, decisions, charge),
            self._shared.book,
            self._shared.journal,
            self._quotas,
            tracer,
            verifier_wait_s=config.verifier_wait_s,
            clock=clock,
        )
        self._server = ServiceServer(
            config.listen,
            SERVICE_NAME,
            reflection=config.reflection,
            max_receive_bytes=_MAX_REQUEST_BYTES,
            max_connection_age_ms=_MAX_CONNECTION_AGE_MS,
            tls=tls,
            client_certs=config.require_client_certs,
            health_address=config.health_listen,
            interceptors=[GrpcDoor(door)],
        )
        add_InferenceServiceServicer_to_server(
            InferenceServicer(router, config.model_name, decisions), self._server.grpc
        )
        autoscaler = Autoscaler(config.streams_per_router, clock)
        shared_demand = SharedDemand(link, config.model_name, config.router_id) if link is not None else None
        self._load_watch = LoadWatch(autoscaler, self._pool, self._dispatcher, queue, clock, shared_demand)
        # KEDA brings no API key.
        add_ExternalScalerServicer_to_server(ScalerServicer(autoscaler), self._server.probed or self._server.grpc)
        app = build_app(HttpParts(router, tokenizer, config.model_name, registry, door))
        self._http = None
        if config.http_listen:
            context = None if tls is None else tls.http_context(client_certs=config.require_client_certs)
            self._http = HttpServer(app, config.http_listen, config.drain_s + _CUT_S, context)
        self._metrics = None
        if config.metrics_listen:
            self._metrics = HttpServer(build_metrics_app(registry), config.metrics_listen, _CUT_S)
        self._pool_changed = asyncio.Event()
        self._pool.subscribe(self._pool_changed.set)
        metrics.watch(queue, lambda: len(self._pool.states()))
        metrics.watch_wanted(autoscaler)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Addresses]:
        """Serve inside the context; leaving it lets running streams end within `drain_s`, and cuts those that are left.

        Raises:
            OSError: if an address cannot be bound.
            ExceptionGroup: if something in the background fails.
        """
        grpc_address = await self._server.start(serving=False)
        http_address = await self._http.start() if self._http is not None else ""
        metrics_address = await self._metrics.start() if self._metrics is not None else ""
        async with asyncio.TaskGroup() as background:
            tasks = [background.create_task(work) for work in self._background()]
            try:
                yield Addresses(grpc_address, http_address, metrics_address)
            finally:
                await self._drain()
                for task in tasks:
                    task.cancel()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self._dispatcher.run(),
            self._report_health(),
            self._peers.run(self._pool.update),
            *self._shared.background(),
            self._quotas.run(),
            self._load_watch.run(),
            *([] if self._keyring is None else [self._keyring.run()]),
        ]

    async def _report_health(self) -> None:
        """SERVING while at least one verifier can take work."""
        while True:
            await self._pool_changed.wait()
            self._pool_changed.clear()
            await self._server.set_serving(self._pool.is_serving)

    async def _drain(self) -> None:
        """Refuse new requests, let running ones end or interrupt them, then let go of verifiers and Redis."""
        drain_s = self._config.drain_s
        cut = asyncio.get_running_loop().call_later(drain_s, self._router.interrupt, "the router shuts down")
        http_drain = [self._http.drain()] if self._http is not None else []
        await asyncio.gather(self._server.drain(drain_s + _CUT_S), *http_drain)
        cut.cancel()
        await self._pool.close()
        self._quotas.settle()
        await self._shared.close()
        if self._metrics is not None:
            await self._metrics.drain()


def make_queue(config: RouterConfig, tenants: Tenants, clock: Callable[[], float]) -> RequestQueue:
    """The queue that the configuration asks for."""
    order: Order[Ticket] = ArrivalOrder() if config.queue_policy == "fifo" else QosOrder(config.qos, config.ageing_s)
    return RequestQueue(
        config.max_queued_requests,
        config.max_queued_tokens,
        clock,
        max_bytes=config.max_queued_bytes,
        order=order,
        weight_of=tenants.weight,
    )


def _link_maker(
    config: RouterConfig, tokenizer: Tokenizer, tls: Tls | None
) -> Callable[[str, Callable[[], None]], VerifierLink]:
    identity = ModelIdentity(
        name=config.model_name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
    )

    def make_link(address: str, on_change: Callable[[], None]) -> VerifierLink:
        call = functools.partial(dial, tls=tls)
        return VerifierLink(address, identity, config.router_id, config.token_credit, on_change, random.Random(), call)

    return make_link


async def run(config: RouterConfig, stop: asyncio.Event) -> None:
    """Load the tokenizer, serve until `stop` is set, then drain."""
    tracer = setup_tracing("treeserve-router", config.otlp_endpoint)
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, config.model_folder)
    async with RouterProcess(config, tokenizer, tracer, registry).running() as addresses:
        settle_in()
        _log.info("serving", grpc=addresses.grpc, http=addresses.http, verifiers=config.verifiers)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m treeserve_router`."""
    run_service("router", RouterConfig, run, argv)
