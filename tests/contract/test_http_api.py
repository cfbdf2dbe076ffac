"""The OpenAI-compatible API over a real socket, against a scripted verifier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random, recite
from support.router_rig import RouterRig, running_router
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve_core.errors import OverloadedError, TreeserveError
from treeserve_router import http_app
from treeserve_text.tokenizer import Tokenizer

TEXT = "naïve 🙂 end"


@pytest.fixture
def verifier(tokenizer: Tokenizer, tmp_path: Path) -> FakeVerifier:
    return FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", recite(tokenizer.encode(TEXT)))


@pytest.fixture
async def http(rig: RouterRig) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as client:
        yield client


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "one two", "max_tokens": 8, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "one"}], "max_tokens": 8, **fields}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of each server-sent event; checks framing and the end mark."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_completion(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    response = await http.post("/v1/completions", json=completion(max_tokens=len(ids), seed=5))
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}]
    prompt_tokens = len(tokenizer.encode("one two"))
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "total_tokens": prompt_tokens + len(ids),
    }
    assert body["seed"] == 5
    assert body["metrics"]["speculative_decoding"] == {
        "num_drafts": len(ids),
        "num_draft_tokens": 2 * len(ids),
        "num_accepted_tokens": 1,
        "num_accepted_tokens_per_pos": [1],
        "acceptance": "replay",
        "lossy": False,
    }


async def test_streamed_completion_adds_up_to_the_whole(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    body = completion(max_tokens=40, seed=5, stop=["nowhere", "end"])
    whole = (await http.post("/v1/completions", json=body)).json()
    pieces = await events(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert whole["choices"][0]["text"] == TEXT.removesuffix("end")
    assert "".join(p["choices"][0]["text"] for p in pieces if p["choices"]) == whole["choices"][0]["text"]
    assert [p["choices"][0]["finish_reason"] for p in pieces if p["choices"]][-1] == "stop"
    assert pieces[-1]["usage"] == whole["usage"]
    assert len({p["id"] for p in pieces}) == 1


async def test_chat_completion(http: httpx.AsyncClient, verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    content = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
    body = chat(messages=[{"role": "user", "content": content}], max_completion_tokens=5, max_tokens=None)
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert list(verifier.submits[0].prompt_token_ids) == tokenizer.encode("user: one\nassistant: ")
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": tokenizer.decode(tokenizer.encode(TEXT)[:5])}
    assert answer["usage"]["completion_tokens"] == 5


async def test_streamed_chat(http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/chat/completions", json=chat(seed=1))).json()
    pieces = await events(http, "/v1/chat/completions", chat(seed=1))
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    assert pieces[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all("usage" not in piece for piece in pieces)


async def test_log_probs(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = (tokenizer.encode(TEXT) * 2)[:8]  # recited over and over
    texts = [tokenizer.decode([token_id], skip_special=False) for token_id in ids]
    assert texts[:2] == ["na\ufffd", "\ufffd"], "a character lies in two tokens"
    texts = ["bytes:\\x6e\\x61\\xc3" if text == "na\ufffd" else text for text in texts]
    texts = ["bytes:\\xaf" if text == "\ufffd" else text for text in texts]
    answer = (await http.post("/v1/completions", json=completion(logprobs=0))).json()
    log_probs = answer["choices"][0]["logprobs"]
    assert log_probs["tokens"] == texts
    assert log_probs["token_logprobs"] == [-float(n) for n in range(1, 9)]
    assert log_probs["text_offset"][:2] == [0, 2]
    answer = (await http.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=0))).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == texts
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="ignore").startswith("naïve")
    pieces = await events(http, "/v1/completions", completion(logprobs=0))
    streamed = [token for p in pieces for token in p["choices"][0]["logprobs"]["tokens"]]
    assert streamed == texts


async def test_all_parameters_reach_the_verifier(http: httpx.AsyncClient, verifier: FakeVerifier) -> None:
    body = completion(
        prompt=[5, 6],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={"9": -100},
        seed=3,
        stop="zzz",
        min_tokens=2,
        stop_token_ids=[8],
        ignore_eos=True,
        service_class="batch",
        ttft_ms=10,
        tpot_ms=5.5,
        speculation={"max_nodes": 3},
        user="someone",
    )
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    sent = verifier.submits[0]
    assert list(sent.prompt_token_ids) == [5, 6]
    assert sent.sampling == common.SamplingParameters(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={9: -100},
        seed=3,
    )
    assert sent.stopping == common.StoppingCriteria(
        max_tokens=8, min_tokens=2, stop_strings=["zzz"], stop_token_ids=[8], ignore_eos=True
    )
    assert sent.service_level == common.ServiceLevel(service_class=common.SERVICE_CLASS_BATCH, ttft_ms=10, tpot_ms=5.5)
    assert sent.speculation.max_nodes == 3
    await http.post("/v1/completions", json=completion(speculation={"enabled": False}))
    assert verifier.submits[1].speculation.disabled


async def test_defaults_are_openais(http: httpx.AsyncClient, verifier: FakeVerifier) -> None:
    await http.post("/v1/completions", json={"prompt": "one", "stop": None, "seed": None})
    assert verifier.submits[0].sampling.temperature == 1.0
    assert verifier.submits[0].stopping.max_tokens == 16
    prompt_tokens = len(verifier.tokenizer.encode("user: one\nassistant: "))
    await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "one"}]})
    assert verifier.submits[1].stopping.max_tokens == 256 - prompt_tokens
    nulls = chat(messages=[{"role": "user", "content": "one", "name": None}], speculation={"max_nodes": None})
    assert (await http.post("/v1/chat/completions", json=nulls)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", completion(n=2), "n"),
        ("/v1/completions", completion(best_of=2), "best_of"),
        ("/v1/completions", completion(echo=True), "echo"),
        ("/v1/completions", completion(suffix="x"), "suffix"),
        ("/v1/completions", completion(prompt=["a", "b"]), "prompt"),
        ("/v1/completions", completion(prompt=[[1, 2]]), "prompt[0]"),
        ("/v1/completions", completion(prompt=[-1]), "prompt"),
        ("/v1/completions", completion(prompt=""), "prompt"),
        ("/v1/completions", completion(max_tokens=0), "max_tokens"),
        ("/v1/completions", completion(max_tokens=1000), "max_tokens"),
        ("/v1/completions", completion(max_tokens=2**32), "max_tokens"),
        ("/v1/completions", completion(temperature=-1), "temperature"),
        ("/v1/completions", completion(temperature="hot"), "temperature"),
        ("/v1/completions", completion(top_p=0), "top_p"),
        ("/v1/completions", completion(seed=-1), "seed"),
        ("/v1/completions", completion(logit_bias={"x": 1}), "logit_bias"),
        ("/v1/completions", completion(logit_bias={"7": 1, "007": 2}), "logit_bias"),
        ("/v1/completions", completion(logit_bias={"1" * 5000: 1}), "logit_bias"),
        ("/v1/completions", completion(logprobs=21), "top_log_probs"),
        ("/v1/completions", completion(stop=[""]), "stop_strings"),
        ("/v1/completions", completion(service_class="urgent"), "service_class"),
        ("/v1/completions", completion(stream_options={"surprise": 1}), "stream_options.surprise"),
        ("/v1/completions", {"model": "tiny"}, "prompt"),
        ("/v1/chat/completions", chat(tools=[]), "tools"),
        ("/v1/chat/completions", chat(response_format={"type": "xml"}), "response_format.type"),
        ("/v1/chat/completions", chat(top_logprobs=3), "top_logprobs"),
        ("/v1/chat/completions", chat(max_completion_tokens=3), "max_tokens"),
        ("/v1/chat/completions", chat(messages=[]), "messages"),
        ("/v1/chat/completions", chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
        ("/v1/chat/completions", chat(messages=[{"role": "user"}]), "messages[0].content"),
        (
            "/v1/chat/completions",
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0].type",
        ),
        ("/v1/completions", completion(speculation={"acceptance": "bogus"}), "speculation.acceptance"),
        ("/v1/completions", completion(speculation={"acceptance": "typical", "typical_epsilon": 2}), "speculation."),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert (error["param"] or "").startswith(param)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", chat(messages=[{"role": "assistant", "content": None}]), "messages[0].content: "),
        ("chat/completions", chat(messages=[{"role": None, "content": "x"}]), "messages[0].role: "),
        (
            "chat/completions",
            chat(messages=[{"role": "user", "content": [{"type": "text", "text": None}]}]),
            "messages[0].content[0].text: ",
        ),
        ("chat/completions", chat(messages=[None]), "messages[0]: "),
        ("chat/completions", chat(messages=None), "messages: "),
        (
            "chat/completions",
            chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": None}}),
            "response_format.json_schema.schema: ",
        ),
        ("completions", completion(prompt=None), "prompt: "),
        ("completions", completion(stop=["a", None]), "stop[1]: "),
    ],
)
async def test_a_null_where_something_is_needed_is_told_as_one(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], message: str
) -> None:
    response = await http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] == f"{message}must not be null"


async def test_a_null_content_beside_tool_calls_is_not_what_is_refused(http: httpx.AsyncClient) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    response = await http.post("/v1/chat/completions", json=chat(messages=[calling]))
    assert response.json()["error"]["message"] == "messages[0].tool_calls: is not supported"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "one", "stop": "\\udfff"}',
        b'{"prompt": "one", "session_id": "\\ud800"}',
        b'{"prompt": "one", "\\ud800": 1}',
        b'{"prompt": "one", "seed": ' + b"9" * 5000 + b"}",
    ],
)
async def test_a_body_that_is_no_json_text_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/completions", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "body"


async def test_every_refusal_has_openais_shape(http: httpx.AsyncClient, verifier: FakeVerifier) -> None:
    answers = [
        (await http.post("/v1/completions", json=completion(model="other")), 404),
        (await http.post("/v1/completions", content=b"{"), 400),
        (await http.post("/v1/completions", json=[]), 400),
        (await http.post("/v1/completions", content=b" " * (9 << 20)), 413),
        (await http.get("/v1/completions"), 405),
        (await http.get("/v2"), 404),
        (await http.get("/v1/models/other"), 404),
    ]
    for response, status in answers:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert verifier.submits == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(OverloadedError("full", 0.01), 429), (TreeserveError("internal error"), 500)]
)
async def test_a_failure_before_the_first_token_has_its_status(
    http: httpx.AsyncClient, verifier: FakeVerifier, error: TreeserveError, status: int, stream: bool
) -> None:
    verifier.refuse = error
    response = await http.post("/v1/completions", json=completion(stream=stream))
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == (status == 429)


async def test_a_failure_in_mid_stream_is_an_event(
    tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    verifier.hold_at = 3
    async with fake_verifiers(verifier):
        async with running_router(tmp_path, tokenizer, [verifier], verifier_wait_s=0.05) as rig:
            async with httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as http:
                running = asyncio.create_task(events(http, "/v1/completions", completion()))
                await until(lambda: rig.metric("treeserve_router_output_tokens_total") >= 1)
                await verifier.kill()
                pieces = await running
    assert pieces[-1]["error"]["code"] == "unavailable"
    assert pieces[0]["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(
    http: httpx.AsyncClient, rig: RouterRig, verifier: FakeVerifier, stream: bool
) -> None:
    verifier.hold_at = 3
    running = asyncio.create_task(http.post("/v1/completions", json=completion(stream=stream)))
    await until(lambda: verifier.frames == 3)
    running.cancel()
    await until(lambda: len(verifier.cancelled) == 1)
    await until(lambda: rig.metric("treeserve_router_active_requests") == 0)


async def test_models_health_and_metrics(http: httpx.AsyncClient, rig: RouterRig, verifier: FakeVerifier) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
    await http.post("/v1/completions", json=completion())
    exposition = (await http.get("/metrics")).text
    for name in (
        "gen_ai_server_request_duration_seconds_bucket",
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_time_per_output_token_seconds_bucket",
        'treeserve_router_queue_depth{service_class="realtime"} 0.0',
        'treeserve_router_queue_age_seconds{service_class="batch"} 0.0',
    ):
        assert name in exposition
    await verifier.kill()
    await rig.connected(0)
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/v1/models")).json()["data"] == []


async def test_the_callers_trace_goes_on(
    http: httpx.AsyncClient, tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await http.post("/v1/completions", json=completion(), headers={"traceparent": traceparent})
    # The tracer of these tests records nothing, so the caller's context is passed on as it came.
    assert verifier.submits[0].traceparent == traceparent


async def test_sampled_text_is_the_same_over_both_apis(
    http: httpx.AsyncClient, rig: RouterRig, verifier: FakeVerifier
) -> None:
    from treeserve.inference.v1 import inference_pb2 as pb

    verifier.script = pseudo_random(2, 250)
    body = (await http.post("/v1/completions", json=completion(seed=11, temperature=0.7))).json()
    seen = await rig.generate(
        pb.GenerateRequest(
            prompt="one two",
            sampling=common.SamplingParameters(seed=11, temperature=0.7),
            stopping=common.StoppingCriteria(max_tokens=8),
        )
    )
    assert body["choices"][0]["text"] == seen.text
    assert verifier.submits[0].sampling == verifier.submits[1].sampling


async def test_a_body_that_does_not_come_is_not_waited_for(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_app, "_BODY_TIMEOUT_S", 0.1)

    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(5)

    response = await http.post("/v1/completions", content=half())
    assert response.status_code == 408
    assert response.json()["error"]["type"] == "invalid_request_error"
