"""The SDK against a scripted InferenceService on loopback: streaming, cancelling, deadlines, errors, resuming."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from support.fake_router import SEED, TOKENS, FakeRouter, chunk, fail, finished, started

import treeserve_client as sdk
from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2, inference_pb2_grpc
from treeserve_client.generation import CallOptions, Generation


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def address(router: FakeRouter) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


Run = Callable[..., tuple[list[sdk.Chunk], Any]]


async def _run_async(address: str, params: dict[str, Any]) -> tuple[list[sdk.Chunk], Any]:
    async with sdk.AsyncClient(address) as client:
        stream = client.generate(**params)
        return [c async for c in stream], stream


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, address: str) -> Run:
    """Runs a generation to its end with either client; returns its chunks and the stream."""

    def sync(**params: Any) -> tuple[list[sdk.Chunk], Any]:
        with sdk.Client(address) as client:
            stream = client.generate(**params)
            return list(stream), stream

    def through_asyncio(**params: Any) -> tuple[list[sdk.Chunk], Any]:
        return asyncio.run(_run_async(address, params))

    return sync if request.param == "sync" else through_asyncio


def test_a_whole_generation(router: FakeRouter, run: Run) -> None:
    router.play(chunk(0, TOKENS[:2]), chunk(2, TOKENS[2:]), finished())
    chunks, stream = run(prompt="p")
    assert [(c.offset, c.token_ids, c.text) for c in chunks] == [
        (0, (10, 11), "<10><11>"),
        (2, (12, 13, 14), "<12><13><14>"),
    ]
    assert stream.started == sdk.Started("drawn-by-router", "m", SEED, 3)
    result = stream.result
    assert result.token_ids == tuple(TOKENS)
    assert result.text == "<10><11><12><13><14>"
    assert result.log_probs[4] == sdk.PositionLogProbs(14, -0.5, ((15, -0.25),))
    assert (result.finish_reason, result.stop_string) == ("stop", "END")
    assert result.usage == sdk.Usage(3, 5)
    assert result.speculation == sdk.SpeculationStats(2, 8, 3, (2, 1))
    assert result.speculation.acceptance_length == 2.5
    assert 0 < result.timing.ttft_ms <= result.timing.e2e_ms


def test_the_request_carries_every_parameter(router: FakeRouter, run: Run) -> None:
    router.play(finished())
    run(
        messages=[{"role": "user", "content": "hi"}], model="m", max_tokens=9, min_tokens=2, stop="END",
        stop_token_ids=[4], ignore_eos=True, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={3: -1.0}, seed=0, top_log_probs=0, speculation=False,
        max_nodes=6, service_class="realtime", ttft_ms=250.0, tpot_ms=50.0, session_id="s", request_id="r",
    )  # fmt: skip
    assert router.requests[0] == inference_pb2.GenerateRequest(
        request_id="r",
        model="m",
        chat=inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        sampling=common_pb2.SamplingParameters(
            temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={3: -1.0}, seed=0, top_log_probs=0,
        ),
        stopping=common_pb2.StoppingCriteria(
            max_tokens=9, min_tokens=2, stop_strings=["END"], stop_token_ids=[4], ignore_eos=True
        ),
        speculation=common_pb2.SpeculationOptions(disabled=True, max_nodes=6),
        service_level=common_pb2.ServiceLevel(
            service_class=common_pb2.SERVICE_CLASS_REALTIME, ttft_ms=250.0, tpot_ms=50.0
        ),
        session_id="s",
    )  # fmt: skip


def test_unset_parameters_stay_unset(router: FakeRouter, run: Run) -> None:
    router.play(finished())
    run(token_ids=[1, 2], top_p=None, stop=None)
    assert router.requests[0].tokens.token_ids == [1, 2]
    assert not router.requests[0].sampling.HasField("top_p")
    assert not router.requests[0].sampling.HasField("seed")


def test_requests_that_make_no_sense_fail_before_they_are_sent(address: str) -> None:
    with sdk.Client(address) as client:
        with pytest.raises(sdk.InvalidArgument, match="exactly one of"):
            client.generate()
        with pytest.raises(sdk.InvalidArgument, match="exactly one of"):
            client.generate(prompt="a", token_ids=[1])
        with pytest.raises(sdk.InvalidArgument, match="out of range"):
            client.generate(prompt="a", top_k=-1)
        with pytest.raises(sdk.InvalidArgument) as raised:
            client.generate(prompt="a", service_class="urgent")  # type: ignore[arg-type]
        assert raised.value.fields == {"service_level.service_class": "'urgent' is unknown"}
        with pytest.raises(TypeError, match="temprature"):
            client.generate(prompt="a", temprature=1.0)  # type: ignore[call-arg]


BAD_REQUEST = error_details_pb2.BadRequest(
    field_violations=[error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="too large")]
)
TOO_LARGE = {"sampling.top_p": "too large"}
RETRY = error_details_pb2.RetryInfo()
RETRY.retry_delay.FromMilliseconds(1500)


@pytest.mark.parametrize(
    ("code", "details", "kind", "attributes"),
    [
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            [BAD_REQUEST],
            sdk.InvalidArgument,
            {"fields": {"sampling.top_p": "too large"}},
        ),
        (grpc.StatusCode.NOT_FOUND, [], sdk.NotFound, {}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [RETRY], sdk.ResourceExhausted, {"retry_after_s": 1.5}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [], sdk.ResourceExhausted, {"retry_after_s": None}),
        (grpc.StatusCode.UNAVAILABLE, [], sdk.Unavailable, {}),
        (grpc.StatusCode.CANCELLED, [], sdk.Cancelled, {}),
        (grpc.StatusCode.INTERNAL, [], sdk.Internal, {}),
        (grpc.StatusCode.PERMISSION_DENIED, [], sdk.PermissionDenied, {}),
        (grpc.StatusCode.UNAUTHENTICATED, [], sdk.TreeserveClientError, {}),
    ],
)
def test_errors_are_typed(
    router: FakeRouter, run: Run, code: grpc.StatusCode, details: list[Any], kind: type, attributes: dict[str, Any]
) -> None:
    router.scripts.append(lambda _request: [fail(code, "why", *details)])
    with pytest.raises(sdk.TreeserveClientError, match="why") as raised:
        run(prompt="p")
    assert type(raised.value) is kind
    assert raised.value.code is code
    assert {name: getattr(raised.value, name) for name in attributes} == attributes
    assert len(router.requests) == 1, "nothing is resumed before it started"


def test_a_broken_stream_is_resumed_without_gap_or_repeat(router: FakeRouter, run: Run) -> None:
    died = fail(grpc.StatusCode.UNAVAILABLE, "router died")
    router.play(chunk(0, TOKENS[:2], "he"), died)
    router.scripts.append(lambda _request: [died])  # not back yet
    router.play(chunk(2, TOKENS[2:4], "ll"), died)
    router.play(chunk(4, TOKENS[4:], "o"), finished())
    chunks, stream = run(prompt="p", request_id="r", temperature=1.0, deadline_s=30)
    assert [c.offset for c in chunks] == [0, 2, 4]
    assert stream.result.token_ids == tuple(TOKENS)
    assert stream.result.text == "hello"
    assert [list(r.generated_token_ids) for r in router.requests] == [[], TOKENS[:2], TOKENS[:2], TOKENS[:4]]
    for resumed in router.requests[1:]:
        assert (resumed.request_id, resumed.sampling.seed, resumed.sampling.temperature) == ("r", SEED, 1.0)
        assert (resumed.prompt, resumed.model) == ("p", "m")


def test_resuming_gives_up_after_max_resumes(router: FakeRouter, address: str) -> None:
    died = fail(grpc.StatusCode.UNAVAILABLE, "router died")
    for offset in range(3):
        router.play(chunk(offset, [TOKENS[offset]]), died)
    with sdk.Client(address, max_resumes=2) as client, pytest.raises(sdk.Unavailable, match="router died"):
        list(client.generate(prompt="p"))
    assert len(router.requests) == 3


def test_nothing_is_resumed_past_the_deadline(router: FakeRouter, run: Run) -> None:
    router.play(lambda _context: threading.Event().wait(0.25), fail(grpc.StatusCode.UNAVAILABLE, "router died"))
    with pytest.raises(sdk.DeadlineExceeded):
        run(prompt="p", deadline_s=0.3)
    assert len(router.requests) == 1


def test_a_break_after_the_end_is_no_break(router: FakeRouter, run: Run) -> None:
    router.play(chunk(0, TOKENS), finished(), fail(grpc.StatusCode.UNAVAILABLE, "router died"))
    _, stream = run(prompt="p")
    assert stream.result.token_ids == tuple(TOKENS)
    assert len(router.requests) == 1


def test_a_resume_that_is_another_generation_is_refused(router: FakeRouter, run: Run) -> None:
    router.play(chunk(0, TOKENS[:2]), fail(grpc.StatusCode.UNAVAILABLE, "router died"))
    router.scripts.append(lambda request: [started(request, prompt_tokens=4)])
    with pytest.raises(sdk.Internal, match="another generation"):
        run(prompt="p")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([chunk(0, [1, 2]), chunk(3, [4])], "offset 3 where 2 was due"),
        ([chunk(0, [1, 2]), chunk(1, [2])], "offset 1 where 2 was due"),
        ([chunk(0, [1])], "ended before the generation did"),
        ([finished(), chunk(0, [1])], "chunk out of order"),
        ([finished(), finished()], "finished out of order"),
        ([started(inference_pb2.GenerateRequest())], "started out of order"),
        ([inference_pb2.GenerateResponse(finished=inference_pb2.Finished())], "unknown finish reason"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_found_out(
    router: FakeRouter, run: Run, steps: list[Any], message: str
) -> None:
    router.play(*steps)
    with pytest.raises(sdk.Internal, match=message):
        run(prompt="p")


def test_a_chunk_before_started_is_refused(router: FakeRouter, run: Run) -> None:
    router.scripts.append(lambda _request: [chunk(0, [1])])
    with pytest.raises(sdk.Internal, match="out of order"):
        run(prompt="p")


def hang(router: FakeRouter) -> Callable[[Any], None]:
    return lambda _context: None if router.cancelled.wait(20) else pytest.fail("never cancelled")


def test_close_cancels_on_the_server(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    with sdk.Client(address) as client:
        with client.generate(prompt="p") as stream:
            assert next(stream).token_ids == (1,)
            with pytest.raises(RuntimeError, match="not finished"):
                _ = stream.result
        assert router.cancelled.wait(5)
        assert list(stream) == []


def test_close_from_another_thread_ends_the_iteration(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    with sdk.Client(address) as client:
        stream = client.generate(prompt="p")
        timer = threading.Timer(0.1, stream.close)
        timer.start()
        assert [c.token_ids for c in stream] == [(1,)]
        timer.join()
    assert router.cancelled.wait(5)


async def test_async_close_cancels_on_the_server(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    async with sdk.AsyncClient(address) as client:
        async with client.generate(prompt="p") as stream:
            assert (await anext(stream)).token_ids == (1,)
        assert await asyncio.to_thread(router.cancelled.wait, 5)
        assert [c async for c in stream] == []


async def test_async_close_from_another_task_ends_the_iteration(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    async with sdk.AsyncClient(address) as client:
        stream = client.generate(prompt="p")
        asyncio.get_running_loop().call_later(0.1, stream.close)
        assert [c.token_ids async for c in stream] == [(1,)]


async def test_closing_the_client_ends_its_streams_and_cancels_no_task(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    client = sdk.AsyncClient(address)
    stream = client.generate(prompt="p")
    assert (await anext(stream)).token_ids == (1,)
    closing = asyncio.create_task(client.close())
    with pytest.raises(sdk.Cancelled):
        await anext(stream)
    await closing


async def test_cancelling_the_reading_task_cancels_on_the_server(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    reached = asyncio.Event()

    async def read(stream: AsyncIterator[sdk.Chunk]) -> None:
        async for _chunk in stream:
            reached.set()

    async with sdk.AsyncClient(address) as client:
        task = asyncio.create_task(read(client.generate(prompt="p")))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancelled.wait, 5)


@pytest.mark.parametrize("deadline_s", [1e12, float("inf")])
def test_a_deadline_beyond_all_time_is_none(router: FakeRouter, run: Run, deadline_s: float) -> None:
    router.play(chunk(0, TOKENS), finished())
    _, stream = run(prompt="p", deadline_s=deadline_s)
    assert stream.result.token_ids == tuple(TOKENS)


def test_the_deadline_ends_a_hanging_stream(router: FakeRouter, run: Run) -> None:
    router.play(chunk(0, [1]), hang(router))
    with pytest.raises(sdk.DeadlineExceeded):
        run(prompt="p", deadline_s=0.3)
    assert router.cancelled.wait(5)


def test_complete_and_models(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, TOKENS), finished())
    with sdk.Client(address) as client:
        assert client.complete(prompt="p").token_ids == tuple(TOKENS)
        assert client.list_models() == [sdk.Model("m", "ab", 300, (2,), 2048, 1, "float32")]
        with pytest.raises(sdk.NotFound, match="'x'"):
            client.get_model("x")


async def test_async_complete_and_models(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, TOKENS), finished())
    async with sdk.AsyncClient(address) as client:
        assert (await client.complete(prompt="p")).token_ids == tuple(TOKENS)
        assert [m.name for m in await client.list_models()] == ["m"]
        with pytest.raises(sdk.NotFound, match="'x'"):
            await client.get_model("x")


def test_an_unreachable_router_is_unavailable() -> None:
    with sdk.Client("127.0.0.1:1") as client, pytest.raises(sdk.Unavailable):
        client.complete(prompt="p")


def test_timing_follows_the_clock() -> None:
    now = [100.0]
    generation = Generation(inference_pb2.GenerateRequest(), CallOptions(), clock=lambda: now[0])
    for at, event in [
        (100.0, started(inference_pb2.GenerateRequest())),
        (100.5, chunk(0, [1, 2])),
        (101.1, chunk(2, [3])),
    ]:
        now[0] = at
        generation.receive(event)
    now[0] = 102.0
    generation.receive(finished())
    assert generation.result is not None
    timing = generation.result.timing
    assert (round(timing.ttft_ms), round(timing.tpot_ms), round(timing.e2e_ms)) == (500, 300, 2000)


class _Unreachable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> None:
        return None


def test_a_router_has_half_a_minute_to_come_back_each_time() -> None:
    now = [0.0]
    request = inference_pb2.GenerateRequest()
    generation = Generation(request, CallOptions(max_resumes=2), clock=lambda: now[0])
    for _ in range(2):
        generation.receive(started(request))
        delays = []
        with pytest.raises(sdk.Unavailable):
            while True:
                delays.append(generation.resume_delay_s(_Unreachable()))
                assert delays[-1] is not None
                now[0] += delays[-1]
        assert delays[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
        assert 30 <= sum(delays) < 33
    generation.receive(started(request))
    with pytest.raises(sdk.Unavailable):
        generation.resume_delay_s(_Unreachable())
