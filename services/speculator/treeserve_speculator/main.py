"""Builds a speculator from its configuration and runs it until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from grpc_health.v1 import health

from treeserve_core.identity import ModelIdentity
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.conversation import DraftPeer
from treeserve_speculator.draft_client import DraftClient, draft_hello
from treeserve_speculator.draft_clients import DraftClients
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.session import DraftSession
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.registry import build_sources
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.discovery import PeerWatch
from treeserve_wire.process import run_service, settle_in
from treeserve_wire.server import ServiceServer
from treeserve_wire.telemetry import setup_tracing, start_metrics
from treeserve_wire.tls import Tls

_STOP_GRACE_S = 1.0

_log = structlog.get_logger(__name__)


async def run(config: SpeculatorConfig, stop: asyncio.Event) -> None:
    """Build the sources, draft for all configured verifiers until `stop` is set, then end the streams."""
    tracer = setup_tracing("treeserve-speculator", config.otlp_endpoint)
    tls = Tls.of(config.tls)
    metrics = SpeculatorMetrics()
    identity = await asyncio.to_thread(read_identity, config.model_folder, config.model_name)
    drafter = await asyncio.to_thread(build_drafter, config, identity, metrics)
    start_metrics(config.metrics_listen)
    watch = PeerWatch(config.verifiers)
    # It serves nothing else: its work is a client's.
    server = ServiceServer(config.listen, health.SERVICE_NAME, tls=tls, health_address=config.health_listen)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter") as executor:
        peer = DraftPeer(
            executor=executor,
            new_session=lambda limits: DraftSession(drafter, limits, metrics, tracer),
            hello=draft_hello(config.speculator_id, identity, drafter),
            metrics=metrics,
        )
        clients = DraftClients(lambda address: DraftClient(address, peer, random.Random(), tls=tls))
        address = await server.start()
        settle_in()
        _log.info("serving", health=address, sources=drafter.source_names, verifiers=config.verifiers)
        watching = asyncio.create_task(watch.run(clients.update))
        await stop.wait()
        watching.cancel()
        await clients.stop()
        await server.drain(_STOP_GRACE_S)


def read_identity(model_folder: Path, model_name: str) -> ModelIdentity:
    """Identity of the target model from its folder: tokenizer and config alone, no weights."""
    tokenizer = Tokenizer.from_folder(model_folder)
    rows = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    return ModelIdentity(
        name=model_name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=max(rows, tokenizer.vocab_size),
        eos_token_ids=tokenizer.eos_token_ids,
    )


def build_drafter(config: SpeculatorConfig, identity: ModelIdentity, metrics: SpeculatorMetrics) -> Drafter:
    """The drafter with all configured sources."""
    eos_token_ids = frozenset(identity.eos_token_ids)
    settings = SourceSettings(config, identity.vocab_size, identity.tokenizer_hash, eos_token_ids)
    return Drafter(
        build_sources(settings, metrics),
        vocab_size=identity.vocab_size,
        eos_token_ids=eos_token_ids,
        limits=TreeLimits(config.max_nodes, config.max_depth),
        metrics=metrics,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m treeserve_speculator`."""
    run_service("speculator", SpeculatorConfig, run, argv)
