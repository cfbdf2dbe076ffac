"""What a verifier decodes over its streams: the tokens of plain decoding, whatever is drafted, and where it ends."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from support.tree_shapes import SHAPES
from support.verifier_peers import DraftFunction, RouterPeer, RunningVerifier, SpeculatorPeer, running_verifier

from treeserve.common.v1 import common_pb2
from treeserve_core.tree import TokenTree

PROMPT = [10, 20, 30, 40, 50]


def oracle(truth: dict[int, list[int]], shape: str, vocab: int) -> DraftFunction:
    """Drafts trees of a shape around the true continuation of the prompt with a given seed."""
    rng = random.Random(5)

    def draft(tokens: list[int], budget: int, seed: int) -> TokenTree | None:
        rest = truth[seed][len(tokens) :]
        return SHAPES[shape](tokens[-1], rest, budget, vocab, rng)

    return draft


async def test_plain_decoding_equals_transformers(running: RunningVerifier, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :]
    async with RouterPeer(running.address) as router:
        output = await router.generate(1, PROMPT, speculate=False)
    assert output.token_ids == expected.tolist()


VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {7: 3.0}},
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_trees_of_any_shape_change_nothing_but_the_number_of_steps(running: RunningVerifier, shape: str) -> None:
    vocab = running.engine.identity.vocab_size
    requests = [{**v, "seed": seed} for seed, v in enumerate(VARIANTS * 2)]
    prompts = [[*PROMPT, seed] for seed in range(len(requests))]
    async with RouterPeer(running.address) as router:
        plain = await asyncio.gather(
            *(router.generate(h, prompts[h], speculate=False, top_log_probs=2, **r) for h, r in enumerate(requests))
        )
        truth = {h: prompts[h] + output.token_ids for h, output in enumerate(plain)}
        async with SpeculatorPeer(running, oracle(truth, shape, vocab)):
            drafted = await asyncio.gather(
                *(router.generate(100 + h, prompts[h], top_log_probs=2, **r) for h, r in enumerate(requests))
            )
    for before, after in zip(plain, drafted, strict=True):
        assert after.token_ids == before.token_ids
        assert after.log_probs == before.log_probs, "log-probabilities have the same bits"
        assert before.end is not None and after.end is not None
        assert after.end.reason == before.end.reason
        assert before.end.speculation.drafted == 0 and before.end.speculation.steps == len(before.token_ids)
    stats = [output.end.speculation for output in drafted if output.end is not None]
    assert sum(s.drafted for s in stats) > 0
    assert sum(s.accepted for s in stats) == sum(sum(s.accepted_per_depth) for s in stats)
    assert running.metric("spec_decode_num_draft_tokens_total") == sum(s.drafted for s in stats)
    assert running.metric("spec_decode_num_accepted_tokens_total") == sum(s.accepted for s in stats)
    if shape == "misleading":
        assert sum(s.accepted for s in stats) == 0
    else:
        assert sum(s.accepted for s in stats) > 10


def _is_readable(text: bytes) -> bool:
    return text.isascii() and text.decode().isprintable()


@pytest.mark.parametrize("max_tokens", range(1, 9))
async def test_stop_tokens_and_length_end_inside_an_accepted_path(running: RunningVerifier, max_tokens: int) -> None:
    vocab = running.engine.identity.vocab_size
    async with RouterPeer(running.address) as router:
        full = await router.generate(1, PROMPT, max_tokens=12, speculate=False)
        async with SpeculatorPeer(running, oracle({0: PROMPT + full.token_ids}, "comb", vocab)):
            for position in range(8):
                stop = full.token_ids[position]
                first = full.token_ids.index(stop)
                options = {"max_tokens": max_tokens, "stopping": {"stop_token_ids": [stop]}}
                output = await router.generate(10 + position, PROMPT, **options)
                expected = full.token_ids[: min(first + 1, max_tokens)]
                assert output.token_ids == expected
                assert output.end is not None
                stopped = first + 1 <= max_tokens
                assert output.end.reason == (
                    common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
                ), "a stop at the last token is a stop"


async def test_stop_strings_end_at_the_token_that_completes_them(running: RunningVerifier) -> None:
    tokenizer = running.engine.tokenizer
    vocab = running.engine.identity.vocab_size
    readable = {"logit_bias": {t: -100.0 for t in range(vocab) if not _is_readable(tokenizer.token_bytes(t))}}
    async with RouterPeer(running.address) as router:
        full = await router.generate(1, PROMPT, max_tokens=20, speculate=False, **readable)
        text = tokenizer.decode(full.token_ids)
        stops = {text[i : i + 3] for i in range(2, len(text) - 3, 2)}
        assert stops
        async with SpeculatorPeer(running, oracle({0: PROMPT + full.token_ids}, "comb", vocab)):
            for handle, stop in enumerate(sorted(stops), start=10):
                options = {"max_tokens": 20, "stopping": {"stop_strings": [stop]}, **readable}
                on = await router.generate(handle, PROMPT, **options)
                off = await router.generate(handle + 1000, PROMPT, speculate=False, **options)
                assert on.token_ids == off.token_ids and on.end is not None
                assert on.end.stop_string == stop and on.end.reason == common_pb2.FINISH_REASON_STOP
                assert stop in tokenizer.decode(on.token_ids)
                assert stop not in tokenizer.decode(on.token_ids[:-1])


async def test_min_tokens_hold_under_speculation(running: RunningVerifier) -> None:
    vocab = running.engine.identity.vocab_size
    async with RouterPeer(running.address) as router:
        full = await router.generate(1, PROMPT, max_tokens=12, speculate=False)
        stops = full.token_ids[:3]
        stopping = {"stop_token_ids": stops, "min_tokens": 6}
        off = await router.generate(2, PROMPT, speculate=False, stopping=stopping)
        async with SpeculatorPeer(running, oracle({0: PROMPT + off.token_ids}, "scatter", vocab)):
            on = await router.generate(3, PROMPT, stopping=stopping)
    assert on.token_ids == off.token_ids
    assert not set(stops) & set(on.token_ids[:6])


async def test_prefill_is_counted_whatever_its_chunks(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        running_verifier(tiny_model, tmp_path, step_rows=40, prefill_rows=20) as small,
        RouterPeer(small.address) as router,
    ):
        for handle, prompt_len in enumerate((1, 40, 41, 100)):
            before = small.metric("treeserve_verifier_prefill_tokens_total")
            await router.generate(handle, [7] * prompt_len, max_tokens=1, tenant=f"alone-{handle}")
            assert small.metric("treeserve_verifier_prefill_tokens_total") - before == prompt_len - 1


async def test_replay_from_any_point_gives_the_same_tokens(running: RunningVerifier) -> None:
    sampling = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    async with RouterPeer(running.address) as router:
        full = await router.generate(1, PROMPT, **sampling)
        for cut in (1, 7, 16, 23):
            rest = await router.generate(10 + cut, PROMPT, generated=full.token_ids[:cut], **sampling)
            assert rest.first_offset == cut
            assert full.token_ids[:cut] + rest.token_ids == full.token_ids


async def test_the_context_window_ends_where_the_models_positions_do(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        running_verifier(tiny_model, tmp_path, max_context_tokens=1024) as generous,
        RouterPeer(generous.address) as router,
    ):
        assert router.welcome is not None
        window = router.welcome.max_context_tokens
        assert window == generous.engine.runner.model.config.max_position_embeddings == 512
        stopping = {"ignore_eos": True}
        full = await router.generate(1, [7] * (window - 20), max_tokens=20, stopping=stopping)
        assert len(full.token_ids) == 20
        refused = await router.generate(2, [7] * (window - 20), max_tokens=21, stopping=stopping)
        assert refused.end is not None and refused.end.status.code == code_pb2.INVALID_ARGUMENT


async def test_a_pool_that_runs_dry_preempts_and_changes_no_token(tiny_model: Path, tmp_path: Path) -> None:
    requests = [{"temperature": 1.0, "seed": h, "max_tokens": 90} for h in range(6)]
    prompts = [[*PROMPT * 4, h] for h in range(6)]
    options: dict[str, Any] = {"max_context_tokens": 128, "block_size": 16}
    async with (
        running_verifier(tiny_model, tmp_path, kv_tokens=4096, **options) as roomy,
        RouterPeer(roomy.address) as router,
    ):
        expected = [(await router.generate(h, prompts[h], **r)).token_ids for h, r in enumerate(requests)]
    async with running_verifier(tiny_model, tmp_path, kv_tokens=256, **options) as tight:
        truth = {h: prompts[h] + expected[h] for h in range(6)}
        draft = oracle(truth, "scatter", tight.engine.identity.vocab_size)
        async with RouterPeer(tight.address) as router, SpeculatorPeer(tight, draft):
            outputs = await asyncio.gather(*(router.generate(h, prompts[h], **r) for h, r in enumerate(requests)))
        assert tight.verifier._scheduler.preemptions > 0, "the pool must have run dry for this test to mean something"
        tight.check_all_blocks_free()
    assert [output.token_ids for output in outputs] == expected
