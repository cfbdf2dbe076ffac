"""Real speculators for a verifier of this process: beside it, or as processes of their own."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from support.verifier_peers import TIMEOUT_S, RunningVerifier, until
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.conversation import DraftPeer
from treeserve_speculator.draft_client import DraftClient, draft_hello
from treeserve_speculator.main import build_drafter, read_identity
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.session import DraftSession
from treeserve_wire.tls import Tls

TESTS = Path(__file__).parent.parent


def attached(running: RunningVerifier) -> int:
    """How many speculators the verifier has."""
    return running.verifier.loop.load().speculators


@asynccontextmanager
async def drafting(
    running: RunningVerifier, model: Path, *sources: str, name: str = "tiny", **fields: Any
) -> AsyncIterator[CollectorRegistry]:
    """A speculator in this process until the block ends; yields what it counts."""
    config = SpeculatorConfig(model_folder=model, model_name=name, sources=sources, **fields)
    registry = CollectorRegistry()
    metrics = SpeculatorMetrics(registry)
    identity = read_identity(model, name)
    drafter = build_drafter(config, identity, metrics)
    with ThreadPoolExecutor(1) as executor:
        peer = DraftPeer(
            executor=executor,
            new_session=lambda limits: DraftSession(drafter, limits, metrics, NoOpTracer()),
            hello=draft_hello("test", identity, drafter),
            metrics=metrics,
        )
        client = DraftClient(running.address, peer, random.Random(1), refused_s=0.05, tls=Tls.of(config.tls))
        before = attached(running)
        task = asyncio.create_task(client.run())
        try:
            await until(lambda: attached(running) == before + 1)
            yield registry
        finally:
            client.stop()
            await asyncio.wait_for(task, TIMEOUT_S)
    await until(lambda: attached(running) == before)


@dataclass
class SpeculatorProcess:
    """A running `python -m treeserve_speculator`."""

    process: asyncio.subprocess.Process
    metrics_address: str

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    async def faults(self) -> dict[tuple[str, str], float]:
        """What it counted against isolated sources, by source and reason."""
        url = f"http://{self.metrics_address}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        name = "treeserve_speculator_source_faults_total"
        return {(s.labels["source"], s.labels["reason"]): s.value for s in samples if s.name == name}


@asynccontextmanager
async def speculator_process(
    running: RunningVerifier, model: Path, *sources: str, **fields: Any
) -> AsyncIterator[SpeculatorProcess]:
    """A speculator process until the block ends. Test modules are on its path."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        metrics_address = f"127.0.0.1:{listener.getsockname()[1]}"
    flags = {
        "model-folder": model, "model-name": "tiny", "verifiers": running.address, "sources": ",".join(sources),
        "listen": "127.0.0.1:0", "metrics-listen": metrics_address, "log-level": "error", **fields,
    }  # fmt: skip
    before = attached(running)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "treeserve_speculator"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    try:
        await until(lambda: attached(running) == before + 1 or process.returncode is not None)
        assert process.returncode is None, "it did not start"
        yield SpeculatorProcess(process, metrics_address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
