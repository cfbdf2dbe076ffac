"""Explain over gRPC: from the router's decisions to what the SDK shows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import RouterRig, running_router
from typer.testing import CliRunner

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_cli.main import app
from treeserve_client import AsyncClient, Explanation, NotFound, TreeserveClientError
from treeserve_text.tokenizer import Tokenizer


@pytest.fixture
async def verifiers(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[list[FakeVerifier]]:
    made = [FakeVerifier(tokenizer, f"unix:{tmp_path}/{name}.sock", pseudo_random(2, 250)) for name in "ab"]
    async with fake_verifiers(*made):
        yield made


@pytest.fixture
async def full(verifiers: list[FakeVerifier]) -> list[FakeVerifier]:
    """Verifiers of one place, for `filled`."""
    for verifier in verifiers:
        verifier.welcome.max_sequences = 1
    return verifiers


def ask(request_id: str, max_tokens: int = 4, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokens=pb.TokenInput(token_ids=[5, 6, 7]),
        stopping=common_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


async def explained(rig: RouterRig, request_id: str, **metadata: str) -> Explanation:
    async with AsyncClient(rig.grpc, metadata=tuple(metadata.items())) as client:
        explanation = await client.explain(request_id)
    assert explanation.request_id == request_id
    assert explanation.router_id == "test"
    times = [decision.at_s for decision in explanation.decisions]
    assert times == sorted(times)
    assert 0 <= times[-1] <= explanation.age_s
    return explanation


async def until_told(rig: RouterRig, request_id: str, kind: str) -> None:
    """Wait for a decision."""
    async with AsyncClient(rig.grpc) as client, asyncio.timeout(10):
        while True:
            with contextlib.suppress(NotFound):
                if kind in {decision.kind for decision in (await client.explain(request_id)).decisions}:
                    return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def filled(rig: RouterRig, verifiers: list[FakeVerifier]) -> AsyncIterator[None]:
    """Give each verifier of one place a request of two tokens that stops after the first until `hold_at` rises."""
    async with asyncio.TaskGroup() as tasks:
        running = []
        for i, verifier in enumerate(verifiers):
            verifier.hold_at = 1
            running.append(tasks.create_task(rig.generate(ask(f"filler-{i}", max_tokens=2))))
            await until_told(rig, f"filler-{i}", "first_token")
        yield
        for task in running:
            task.cancel()


async def test_the_way_of_a_request_that_had_to_wait_and_to_move(
    full: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first, second = full
    async with (
        running_router(tmp_path, tokenizer, full, explain_requests=10, max_hedges=0) as rig,
        filled(rig, full),
        asyncio.TaskGroup() as tasks,
    ):
        mine = tasks.create_task(rig.generate(ask("waits")))
        await until_told(rig, "waits", "blocked")
        await first.report(sequences=1, free_blocks=9, total_blocks=9, step_ms=5.0, prefill_tokens_per_s=100.0)
        first.hold_at = 2
        await until_told(rig, "filler-0", "ended")
        await first.report(free_blocks=9, total_blocks=9)
        await until_told(rig, "waits", "first_token")
        await first.kill()
        await until_told(rig, "waits", "replayed")
        second.hold_at = None
        assert len((await mine).token_ids) == 4
        explanation = await explained(rig, "waits")
        assert [(decision.kind, decision.verifier_id) for decision in explanation.decisions] == [
            ("queued", ""),
            ("blocked", ""),
            ("placed", "a.sock"),
            ("first_token", "a.sock"),
            ("replayed", ""),
            ("queued", ""),
            ("blocked", ""),
            ("placed", "b.sock"),
            ("ended", "b.sock"),
        ]
        assert explanation.service_class == "standard"
        _, blocked, placed, *_, ended = explanation.decisions
        assert "2 verifier(s) with no free place" in blocked.reason
        assert blocked.cost is None
        assert placed.cost is not None
        assert placed.cost.prefill_s == pytest.approx(0.03, rel=0.01)
        assert placed.cost.wait_s > 0.0049
        assert ended.reason == "length"


async def test_the_command_shows_the_way_as_a_table(
    verifiers: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with running_router(tmp_path, tokenizer, verifiers, explain_requests=9) as rig:
        await rig.generate(ask("mine"))
        arguments = ["explain", "mine", "--address", rig.grpc]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.stderr
    assert all(word in result.stdout for word in ("mine (standard) at test", "queued", "placed", "prefill", "ended"))


async def test_what_is_unknown_is_not_found(
    verifiers: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with running_router(tmp_path, tokenizer, verifiers, explain_requests=1) as rig:
        await rig.generate(ask("first"))
        await rig.generate(ask("second"))
        assert await explained(rig, "second")
        for request_id in ("first", "never", ""):
            with pytest.raises(NotFound, match="another may have run it"):
                await explained(rig, request_id)


async def test_a_tenant_is_told_of_its_own_requests_only(
    verifiers: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with running_router(tmp_path, tokenizer, verifiers, explain_requests=9, tenant_header="x-tenant") as rig:
        await rig.generate(ask("mine"), metadata=(("x-tenant", "me"),))
        await rig.generate(ask("nobodys"))
        assert await explained(rig, "mine", **{"x-tenant": "me"})
        for request_id, metadata in (("mine", {"x-tenant": "you"}), ("mine", {}), ("nobodys", {})):
            with pytest.raises(NotFound):
                await explained(rig, request_id, **metadata)


async def test_it_is_off_by_default(verifiers: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with running_router(tmp_path, tokenizer, verifiers) as rig:
        await rig.generate(ask("mine"))
        with pytest.raises(TreeserveClientError) as caught:
            await explained(rig, "mine")
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_refused_request_says_why_and_when_to_come_back(
    full: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with running_router(tmp_path, tokenizer, full, explain_requests=9) as rig, filled(rig, full):
        for verifier in full:
            await verifier.report(sequences=1, free_blocks=9, total_blocks=9, step_ms=5.0, prefill_tokens_per_s=1000.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(ask("late", service_level=common_pb2.ServiceLevel(ttft_ms=200)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "0.2 s are the target" in (caught.value.details() or "")
        kinds = [decision.kind for decision in (await explained(rig, "late")).decisions]
        assert kinds == ["queued", "blocked", "refused", "ended"]


async def test_a_sequence_carries_what_the_verifier_plans_by(
    full: list[FakeVerifier], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first, second = full
    async with (
        running_router(tmp_path, tokenizer, full, explain_requests=9) as rig,
        filled(rig, full),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(rig.generate(ask("waits", session_id="talk")))
        await until_told(rig, "waits", "blocked")
        first.hold_at = second.hold_at = None
        await until_told(rig, "waits", "ended")
        (submitted,) = [message for verifier in full for message in verifier.submits if message.request_id == "waits"]
        assert submitted.session_id == "talk"
        assert submitted.waited_ms > 0
        (filler, *_) = first.submits
        assert filler.waited_ms < submitted.waited_ms
        assert not submitted.preemptible
