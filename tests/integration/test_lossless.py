"""Speculation changes no token: the real model, the real services, trees of every shape, batch 1 and batch 8."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.prompts import PROMPTS
from support.shaped_drafts import truth_key
from support.tree_shapes import SHAPES

from treeserve_cli.cluster import LocalCluster
from treeserve_client import AsyncClient, Client, Completion

TOKENS = 16
SEEDS = 20
# What must hold beside every temperature: filters and penalties of several kinds, and none.
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.95, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"top_k": 50, "min_p": 0.02, "repetition_penalty": 1.1},
    {},
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Case:
    """A request without its speculation settings."""

    seed: int
    temperature: float

    @property
    def params(self) -> dict[str, Any]:
        return {
            "prompt": PROMPTS[self.seed % len(PROMPTS)],
            "seed": self.seed,
            "temperature": self.temperature,
            "max_tokens": TOKENS,
            **PARAMETERS[self.seed % len(PARAMETERS)],
        }


@dataclass(frozen=True)
class Mode:
    """A cluster and what runs on it. float32 runs a quarter: it is slow, and every kind of parameters is in it."""

    address: str
    cases: list[Case]


@pytest.fixture(scope="module", params=["int8", "float32"])
def mode(request: pytest.FixtureRequest) -> Mode:
    cluster: LocalCluster = request.getfixturevalue("int8_cluster" if request.param == "int8" else "cluster")
    seeds = range(SEEDS if request.param == "int8" else SEEDS // 4)
    with Client(cluster.grpc_address) as client:
        assert [model.dtype for model in client.list_models()] == [request.param]
    return Mode(cluster.grpc_address, [Case(seed, temperature) for temperature in (0.0, 0.7, 1.0) for seed in seeds])


@pytest.fixture(scope="module")
def plain(mode: Mode, truth_file: Path) -> dict[Case, tuple[int, ...]]:
    """What plain decoding, one request at a time, gives; the shaped source learns it too."""

    async def run() -> dict[Case, tuple[int, ...]]:
        async with AsyncClient(mode.address) as client:
            done = {case: await client.complete(speculation=False, **case.params) for case in mode.cases}
        assert all(c.speculation.drafted == 0 for c in done.values())
        return {case: tuple(completion.token_ids) for case, completion in done.items()}

    tokens = asyncio.run(run())
    truth_file.write_text(json.dumps({truth_key(c.seed, c.temperature): list(t) for c, t in tokens.items()}))
    return tokens


async def _decode(mode: Mode, shape: str | None, batch: int) -> dict[Case, Completion]:
    """Run the cases, `batch` at a time; `shape` None decodes plainly."""
    places = asyncio.Semaphore(batch)
    options: dict[str, Any] = {"speculation": shape is not None}
    if shape is not None:
        options["logit_bias"] = {list(SHAPES).index(shape): 0.0}  # tells the source; changes nothing else

    async with AsyncClient(mode.address) as client:

        async def one(case: Case) -> Completion:
            async with places:
                return await client.complete(**case.params, **options)

        return dict(zip(mode.cases, await asyncio.gather(*map(one, mode.cases)), strict=True))


def _check(done: dict[Case, Completion], plain: dict[Case, tuple[int, ...]]) -> int:
    """Assert equality; returns the number of accepted draft nodes."""
    for case, completion in done.items():
        assert tuple(completion.token_ids) == plain[case], case
    return sum(completion.speculation.accepted for completion in done.values())


async def test_a_batch_changes_nothing(mode: Mode, plain: dict[Case, tuple[int, ...]]) -> None:
    _check(await _decode(mode, None, batch=8), plain)


@pytest.mark.parametrize("shape", SHAPES)
async def test_trees_change_nothing_in_a_batch(mode: Mode, plain: dict[Case, tuple[int, ...]], shape: str) -> None:
    done = await _decode(mode, shape, batch=8)
    accepted = _check(done, plain)
    assert sum(c.speculation.drafted for c in done.values()) > 0
    if shape != "misleading":
        assert accepted > len(mode.cases), "the trees must have been good for something, or nothing was tested"


@pytest.mark.parametrize("shape", SHAPES)
async def test_trees_change_nothing_alone(mode: Mode, plain: dict[Case, tuple[int, ...]], shape: str) -> None:
    _check(await _decode(mode, shape, batch=1), plain)
