"""Runs a speculator process: builds its sources, serves its verifiers, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import uvloop

from treeserve_core.errors import TreeserveError
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
from treeserve_wire.config import load_config
from treeserve_wire.discovery import PeerWatch
from treeserve_wire.server import ServiceServer
from treeserve_wire.telemetry import setup_logging, setup_tracing, start_metrics

_SERVICE = "treeserve.speculator"
_DRAIN_GRACE_S = 1.0

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Exits with a message if the configuration or a folder it names cannot be used."""
    metrics = SpeculatorMetrics()
    try:
        config = load_config(SpeculatorConfig, argv)
        setup_logging("speculator", config.log_level)
        identity = read_identity(config.model_folder, config.model_name)
        drafter = build_drafter(config, identity, metrics)
    except (TreeserveError, ValueError, OSError) as error:
        sys.exit(f"treeserve_speculator: {error}")
    uvloop.run(serve(config, identity, drafter, metrics))


async def serve(
    config: SpeculatorConfig, identity: ModelIdentity, drafter: Drafter, metrics: SpeculatorMetrics
) -> None:
    """Draft for all configured verifiers until SIGTERM or SIGINT."""
    tracer = setup_tracing("treeserve-speculator", config.otlp_endpoint)
    start_metrics(config.metrics_listen)
    server = ServiceServer(config.listen, _SERVICE, reflection=False)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter") as executor:
        peer = DraftPeer(
            executor=executor,
            new_session=lambda limits: DraftSession(drafter, limits, metrics, tracer),
            hello=draft_hello(config.speculator_id, identity, drafter),
            metrics=metrics,
        )
        clients = DraftClients(lambda address: DraftClient(address, peer, random.Random()))
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        address = await server.start()
        _log.info("speculator ready", health=address, sources=drafter.source_names, verifiers=config.verifiers)
        watching = asyncio.create_task(PeerWatch(config.verifiers).run(clients.update))
        await stop.wait()
        watching.cancel()
        await clients.stop()
        await server.drain(_DRAIN_GRACE_S)


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
        build_sources(settings),
        vocab_size=identity.vocab_size,
        eos_token_ids=eos_token_ids,
        limits=TreeLimits(config.max_nodes, config.max_depth),
        metrics=metrics,
    )
