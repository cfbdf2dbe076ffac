"""Structured output as clients ask for it: gRPC, HTTP and the SDK, to the verifier and into the journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.grammar_cases import JSON, KINDS, SCHEMA
from support.router_requests import detail, refusal, request
from support.router_rig import RouterRig, running_router

from treeserve.common.v1 import common_pb2 as common
from treeserve_client import Client, InvalidArgument
from treeserve_client.request import build_request
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import GrammarKind
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.journal_record import parse_record, request_fields
from treeserve_router.openai_grammar import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from treeserve_text.tokenizer import Tokenizer
from treeserve_wire.grammar_codec import grammar_from_proto, grammar_to_proto


def of_response_format(schema: dict[str, Any]) -> Any:
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="x", schema=schema)).to_grammar()


@pytest.mark.parametrize("kind", KINDS)
def test_grammars_survive_the_wire(kind: str) -> None:
    assert grammar_to_proto(grammar_from_proto(KINDS[kind])) == KINDS[kind]
    assert grammar_from_proto(KINDS[kind]).kind == GrammarKind(kind)


def test_the_journal_keeps_it() -> None:
    sampling = SamplingParams(seed=1, grammar=grammar_from_proto(JSON))
    kept = RouterRequest("r", (1, 2), (), sampling, StoppingCriteria(max_tokens=9), SequenceLimits())
    entry = parse_record(request_fields(kept))
    assert entry is not None and entry.request.sampling == sampling


def test_a_router_that_knows_no_grammars_finds_no_record_of_one() -> None:
    free = RouterRequest("r", (1, 2), (), SamplingParams(), StoppingCriteria(max_tokens=9), SequenceLimits())
    constrained = replace(free, sampling=SamplingParams(grammar=grammar_from_proto(JSON)))
    assert b"request" in request_fields(free) and b"request" not in request_fields(constrained)


@pytest.mark.parametrize("wrap", [lambda schema: StructuredOutputs(json=schema).to_grammar(), of_response_format])
def test_a_schema_nested_too_deeply_is_refused_by_name(wrap: Callable[[dict[str, Any]], Any]) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidArgumentError, match=r"(structured_outputs\.json|json_schema\.schema): is nested too"):
        wrap(schema)


class TestRouter:
    @pytest.fixture
    def verifier(self, tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
        return FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250), grammars=True)

    @pytest.fixture
    async def http(self, rig: RouterRig) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as client:
            yield client

    @pytest.mark.parametrize("kind", KINDS)
    async def test_a_grammar_goes_to_the_verifier(self, rig: RouterRig, verifier: FakeVerifier, kind: str) -> None:
        await rig.generate(request(sampling=common.SamplingParameters(grammar=KINDS[kind])))
        assert verifier.submits[0].sampling.grammar == KINDS[kind]

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"response_format": {"type": "json_object"}}, KINDS["json_object"]),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
                KINDS["json_schema"],
            ),
            ({"structured_outputs": {"json": SCHEMA}}, KINDS["json_schema"]),
            ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, KINDS["json_schema"]),
            ({"structured_outputs": {"json_object": True}}, KINDS["json_object"]),
            ({"structured_outputs": {"regex": "[a-z]+", "choice": None}}, KINDS["regex"]),
            ({"structured_outputs": {"regex": "[a-z]+", "json_object": False}}, KINDS["regex"]),
            ({"structured_outputs": {"grammar": 'start: "a"+'}}, KINDS["lark"]),
            ({"structured_outputs": {"choice": ["a", "b"]}}, KINDS["choice"]),
            ({"response_format": {"type": "text"}}, None),
        ],
    )
    async def test_openais_and_vllms_forms(
        self, http: httpx.AsyncClient, verifier: FakeVerifier, fields: dict[str, Any], expected: common.Grammar | None
    ) -> None:
        body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4, **fields}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        sampling = verifier.submits[0].sampling
        assert (sampling.grammar if sampling.HasField("grammar") else None) == expected

    async def test_completions_know_the_extension_too(self, http: httpx.AsyncClient, verifier: FakeVerifier) -> None:
        body = {"prompt": "one", "structured_outputs": {"regex": "[a-z]+"}}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert verifier.submits[0].sampling.grammar == KINDS["regex"]
        body = {"prompt": "one", "response_format": {"type": "json_object"}}
        assert (await http.post("/v1/completions", json=body)).json()["error"]["param"] == "response_format"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            (
                {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
                "response_format.json_schema",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
                "response_format.json_schema.name",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}},
                "response_format.json_schema.schema",
            ),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"a": "b" * 70_000}},
                    }
                },
                "response_format.json_schema.schema",
            ),
            ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
            ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
            ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
            ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
            ({"structured_outputs": {"surprise": 1}}, "structured_outputs.surprise"),
            ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
            (
                {"structured_outputs": {"regex": "a"}, "temperature": 1, "speculation": {"acceptance": "typical"}},
                "structured_outputs.regex",
            ),
        ],
    )
    async def test_http_refusals_name_the_field(
        self, http: httpx.AsyncClient, verifier: FakeVerifier, fields: dict[str, Any], param: str
    ) -> None:
        body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4, **fields}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert not verifier.submits

    @pytest.mark.parametrize(
        ("grammar", "field"),
        [
            (common.Grammar(regex="(a"), "sampling.grammar.regex"),
            (common.Grammar(regex="a" * 70_000), "sampling.grammar.regex"),
            (common.Grammar(json_schema='{"type": "y"}'), "sampling.grammar.json_schema"),
            (common.Grammar(), "sampling.grammar"),
        ],
    )
    async def test_grpc_refusals_name_the_field(
        self, rig: RouterRig, verifier: FakeVerifier, grammar: common.Grammar, field: str
    ) -> None:
        sampling = common.SamplingParameters(grammar=grammar)
        error = await refusal(rig.stub.Generate(request(sampling=sampling)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert detail(error, error_details_pb2.BadRequest()).field_violations[0].field == field
        assert not verifier.submits

    async def test_verifiers_that_know_no_grammars_get_none(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        old = FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250))
        new = FakeVerifier(tokenizer, f"unix:{tmp_path}/b.sock", pseudo_random(2, 250), grammars=True)
        constrained = request(sampling=common.SamplingParameters(grammar=KINDS["regex"]))
        async with (
            fake_verifiers(old, new),
            running_router(tmp_path, tokenizer, [old, new], verifier_wait_s=0.5) as rig,
        ):
            await rig.connected(2)
            for _ in range(4):
                await rig.generate(constrained)
            assert (len(old.submits), len(new.submits)) == (0, 4)
            await new.kill()
            await rig.connected(1)
            assert (await refusal(rig.stub.Generate(constrained))).code() == grpc.StatusCode.UNAVAILABLE
            await rig.generate(request())


class TestClient:
    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            ({"json_schema": SCHEMA}, KINDS["json_schema"]),
            ({"json_schema": json.dumps(SCHEMA)}, KINDS["json_schema"]),
            ({"json_object": True}, KINDS["json_object"]),
            ({"regex": "[a-z]+"}, KINDS["regex"]),
            ({"lark": 'start: "a"+', "json_object": False}, KINDS["lark"]),
            ({"choice": ["a", "b"]}, KINDS["choice"]),
            ({"choice": "yes"}, common.Grammar(choice=common.Choice(texts=["yes"]))),
        ],
    )
    def test_parameters_make_a_grammar(self, params: Any, expected: common.Grammar) -> None:
        assert build_request({"prompt": "x", **params}).sampling.grammar == expected

    def test_no_parameter_makes_none(self) -> None:
        assert not build_request({"prompt": "x", "json_object": False}).sampling.HasField("grammar")

    def test_two_are_one_too_many(self) -> None:
        with pytest.raises(InvalidArgument, match=r"sampling\.grammar"):
            build_request({"prompt": "x", "regex": "a", "choice": ["b"]})

    async def test_a_refusal_reaches_the_caller(self, rig: RouterRig) -> None:
        def call() -> None:
            with Client(rig.grpc) as client:
                client.complete(prompt="x", regex="(a")

        with pytest.raises(InvalidArgument, match=r"sampling\.grammar\.regex"):
            await asyncio.to_thread(call)
