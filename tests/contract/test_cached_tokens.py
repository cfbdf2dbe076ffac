"""What a verifier still held of a prompt reaches the client's usage, and is never more than the prompt."""

from __future__ import annotations

import pytest
from support.fake_verifier import FakeVerifier
from support.router_rig import RouterRig

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve_text.tokenizer import Tokenizer


@pytest.mark.parametrize(("held", "told"), [(0, 0), (5, 5), (10_000, None)])
async def test_cached_prompt_tokens_are_part_of_the_usage(
    rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, held: int, told: int | None
) -> None:
    verifier.cached_tokens = held
    prompt = "one two three four"
    length = len(tokenizer.encode(prompt))
    asked = pb.GenerateRequest(prompt=prompt, stopping=common.StoppingCriteria(max_tokens=3, ignore_eos=True))
    usage = (await rig.generate(asked)).finished.usage
    assert usage == pb.Usage(prompt_tokens=length, completion_tokens=3, cached_tokens=length if told is None else told)
