"""Structured output by the real model and the real services: valid, and the same tokens with and without trees."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from treeserve_cli.cluster import LocalCluster
from treeserve_client import AsyncClient, Completion

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["black", "white", "ginger"]},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 2},
    },
    "required": ["name", "age", "colour", "likes"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"regex": r"[A-Z][a-z]{2,8} is (black|white|ginger)\."},
    {"choice": ["a black cat", "a white cat", "no cat at all"]},
    {"lark": 'start: word ("," " " word){2}\nword: /[a-z]{3,8}/'},
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 3, "top_k": 50},
)


async def run(address: str, **options: Any) -> list[Completion]:
    async with AsyncClient(address) as client:
        prompt = {"messages": [{"role": "user", "content": "Describe a cat named Tom as JSON."}], "max_tokens": 160}
        cases = [{**grammar, **sampling} for grammar in GRAMMARS for sampling in SAMPLING]
        return await asyncio.gather(*(client.complete(**prompt, **case, **options) for case in cases))


async def test_output_is_valid_and_trees_change_nothing(int8_cluster: LocalCluster) -> None:
    address = int8_cluster.grpc_address
    plain = await run(address, speculation=False)
    drafted = await run(address)
    multi_step = await run(address, acceptance="multi_step")
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.speculation.accepted for c in drafted) > 50
    whole = [c for done in (plain, multi_step) for c in done[: len(SAMPLING)] if c.finish_reason == "stop"]
    assert len(whole) >= len(SAMPLING)
    for completion in whole:
        value = json.loads(completion.text)
        assert set(value) == set(SCHEMA["required"]) and 0 <= value["age"] <= 99 and len(value["likes"]) <= 2
    for completion in (*plain[8:12], *multi_step[8:12]):
        assert completion.text in GRAMMARS[2]["choice"] and completion.finish_reason == "stop"
