"""Generate with tokens that the client already has: the stream goes on behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_verifier import FakeVerifier, recite
from support.router_requests import request
from support.router_rig import RouterRig
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve_text.tokenizer import Tokenizer


class TestResume:
    @pytest.mark.parametrize("kept", [1, 4, 9, 12])
    async def test_goes_on_where_the_client_is(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, kept: int
    ) -> None:
        whole = await rig.generate(request())
        rest = await rig.generate(
            request(
                sampling=common.SamplingParameters(seed=whole.started.seed), generated_token_ids=whole.token_ids[:kept]
            )
        )
        assert rest.token_ids == whole.token_ids[kept:]
        assert all(chunk.offset >= kept for chunk in rest.chunks)
        assert rest.finished.usage == whole.finished.usage
        assert rest.finished.reason == whole.finished.reason
        assert len(verifier.submits) == (2 if kept < 12 else 1)

    async def test_text_continues_inside_a_character_and_a_possible_stop_string(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        ids = [token_id for char in "aSTé🙂STb" for token_id in tokenizer.encode(char)]
        verifier.script = recite(ids)
        options: dict[str, Any] = {"stopping": {"stop_strings": ["STOP"]}}
        whole = await rig.generate(request(len(ids), **options))
        assert whole.text == "aSTé🙂STb"
        for kept in range(1, len(ids)):
            rest = await rig.generate(request(len(ids), generated_token_ids=ids[:kept], **options))
            assert rest.token_ids == ids[kept:]
            assert rest.text == whole.text[len(tokenizer.decode(ids[:kept]).rstrip("�")) :]

    @pytest.mark.parametrize("length", range(1, 10))
    async def test_a_client_that_resumes_after_any_chunk_reads_the_same_text(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer, length: int
    ) -> None:
        token_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        verifier.script = recite([token_of[bytes([byte])] for byte in b"a\xc3\xc3b\xf0\x9f\xe0\x82\xc3"])
        interrupted = request(length)
        whole = await rig.generate(interrupted)
        for received in range(len(whole.chunks) + 1):
            chunks = whole.chunks[:received]
            interrupted.generated_token_ids[:] = [token_id for chunk in chunks for token_id in chunk.token_ids]
            rest = await rig.generate(interrupted)
            assert "".join(chunk.text for chunk in chunks) + rest.text == whole.text
            assert [*interrupted.generated_token_ids, *rest.token_ids] == whole.token_ids
            assert rest.finished.usage == whole.finished.usage

    async def test_a_complete_output_ends_at_once(
        self, rig: RouterRig, verifier: FakeVerifier, tokenizer: Tokenizer
    ) -> None:
        eos = tokenizer.eos_token_ids[0]
        seen = await rig.generate(request(generated_token_ids=[5, eos]))
        assert (seen.finished.reason, seen.token_ids) == (common.FINISH_REASON_STOP, [])
        assert seen.finished.usage.completion_tokens == 2
        assert verifier.submits == []

    async def test_a_newer_call_takes_over(self, rig: RouterRig, verifier: FakeVerifier) -> None:
        verifier.hold_at = 3
        older = asyncio.create_task(rig.generate(request(request_id="same")))
        await until(lambda: verifier.frames == 3)
        verifier.hold_at = 6
        newer = asyncio.create_task(rig.generate(request(request_id="same")))
        ended = await older
        assert ended.finished.reason == common.FINISH_REASON_CANCELLED
        assert ended.finished.usage.completion_tokens == len(ended.token_ids)
        await until(lambda: len(verifier.cancelled) == 1)
        verifier.hold_at = None
        assert len((await newer).token_ids) == 12
