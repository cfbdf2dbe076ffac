"""What a verifier still held of a prompt reaches the client's usage, and is never more than the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import load_tokenizer, running_router

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb


@pytest.mark.parametrize(("held", "told"), [(0, 0), (5, 5), (10_000, None)])
async def test_cached_prompt_tokens_are_part_of_the_usage(tmp_path: Path, held: int, told: int | None) -> None:
    tokenizer = load_tokenizer(tmp_path)
    verifier = FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250))
    verifier.cached_tokens = held
    prompt = "one two three four"
    length = len(tokenizer.encode(prompt))
    async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
        asked = pb.GenerateRequest(prompt=prompt, stopping=common.StoppingCriteria(max_tokens=3, ignore_eos=True))
        usage = (await rig.generate(asked)).finished.usage
    assert usage == pb.Usage(prompt_tokens=length, completion_tokens=3, cached_tokens=length if told is None else told)
