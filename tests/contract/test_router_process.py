"""`python -m treeserve_router` as a process: configuration, start, and draining on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import Collected, load_tokenizer
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.inference.v1.inference_pb2_grpc import InferenceServiceStub
from treeserve_wire.channel import open_channel


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "treeserve_router", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TREESERVE_ROUTER_ID": "from-environment"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_until(process: asyncio.subprocess.Process, event: str) -> dict[str, object]:
    """The first log line of an event; every line must be JSON."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while True:
            line = json.loads(await process.stderr.readline())
            if line["event"] == event:
                return dict(line)


async def test_serves_and_drains(tmp_path: Path) -> None:
    verifier = FakeVerifier(load_tokenizer(tmp_path), f"unix:{tmp_path}/a.sock", pseudo_random(2, 250))
    verifier.hold_at = 3
    flags = ("--model-folder", str(tmp_path), "--model-name", "tiny", "--verifiers", verifier.address)
    listen = ("--listen", f"unix:{tmp_path}/router.sock", "--http-listen", "127.0.0.1:0", "--drain-s", "20")
    async with (
        fake_verifiers(verifier),
        router_process(*flags, *listen) as process,
        open_channel(f"unix:{tmp_path}/router.sock") as channel,
    ):
        ready = await read_until(process, "serving")
        assert str(ready["http"]).startswith("127.0.0.1:")
        await until(lambda: verifier.hello)
        assert verifier.hello is not None
        assert verifier.hello.router_id == "from-environment"
        request = pb.GenerateRequest(prompt="one two", stopping=common.StoppingCriteria(max_tokens=10))
        call = InferenceServiceStub(channel).Generate(request)
        await until(lambda: verifier.frames == 3)
        process.send_signal(signal.SIGTERM)
        await read_until(process, "draining")
        verifier.hold_at = None
        seen = Collected()
        async for response in call:
            seen.add(response)
        assert len(seen.token_ids) == 10
        async with asyncio.timeout(10):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model-name", "tiny"), "--model-folder"),
        (("--model-folder", "nowhere", "--model-name", "tiny"), "no tokenizer.json"),
        (("--model-folder", "x", "--model-name", "tiny", "--redis-url", "http://x"), "redis_url"),
    ],
)
async def test_a_bad_configuration_is_explained(flags: tuple[str, ...], message: str) -> None:
    async with router_process(*flags) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 1
        assert message in stderr.decode()
        assert "Traceback" not in stderr.decode()
