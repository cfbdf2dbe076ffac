"""The SDK when streams break: what it resumes, for how long, and what it refuses to take up."""

from __future__ import annotations

import threading

import grpc
import pytest
from support.client_runs import Run
from support.fake_router import SEED, TOKENS, FakeRouter, Unreachable, chunk, fail, finished, started

import treeserve_client as sdk
from treeserve.inference.v1 import inference_pb2
from treeserve_client.generation import CallOptions, Generation


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


def test_a_router_has_half_a_minute_to_come_back_each_time() -> None:
    now = [0.0]
    request = inference_pb2.GenerateRequest()
    generation = Generation(request, CallOptions(max_resumes=2), clock=lambda: now[0])
    for _ in range(2):
        generation.receive(started(request))
        delays = []
        with pytest.raises(sdk.Unavailable):
            while True:
                delays.append(generation.resume_delay_s(Unreachable()))
                assert delays[-1] is not None
                now[0] += delays[-1]
        assert delays[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
        assert 30 <= sum(delays) < 33
    generation.receive(started(request))
    with pytest.raises(sdk.Unavailable):
        generation.resume_delay_s(Unreachable())
