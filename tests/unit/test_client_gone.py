"""A gRPC client that went away in the middle of its stream is no failure of the router's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_core.acceptance import AcceptanceRule
from treeserve_router import inference_servicer
from treeserve_router.explain import NO_DECISIONS
from treeserve_router.generation import GenerationEvent, Started


class Context:
    """Of a call whose client is gone."""

    def __init__(self) -> None:
        self.aborted = False

    async def write(self, response: object) -> None:
        raise OSError("broken")

    async def abort(self, *_: object) -> None:
        self.aborted = True


async def test_the_generation_ends_and_nothing_is_logged_as_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = False

    async def generate(ask: object) -> AsyncIterator[GenerationEvent]:
        nonlocal ended
        try:
            yield Started("r", 1, 1, AcceptanceRule.REPLAY)
        finally:
            ended = True

    router: Any = SimpleNamespace(generate=generate)
    monkeypatch.setattr(inference_servicer, "_ask_from_proto", lambda request, context: None)
    servicer, context = inference_servicer.InferenceServicer(router, "m", NO_DECISIONS), Context()
    await servicer.Generate(pb.GenerateRequest(), context)  # type: ignore[arg-type]
    assert ended and not context.aborted
    assert "error" not in capsys.readouterr().out.replace("OSError", "")
