"""The verifier's streams, spoken to directly: handshakes, malformed frames, cancelling, credit."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from google.rpc import code_pb2
from support.verifier_peers import (
    Output,
    RouterPeer,
    RunningVerifier,
    SpeculatorPeer,
    running_verifier,
    submission,
    tree_message,
    until,
)

from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.tree import TokenTree
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.draft_stream import DraftStream
from treeserve_verifier.main import load_engine
from treeserve_wire.channel import open_channel

PROMPT = [10, 20, 30, 40, 50]
INVALID, STALE, UNKNOWN = code_pb2.INVALID_ARGUMENT, code_pb2.FAILED_PRECONDITION, code_pb2.NOT_FOUND


def no_idea(tokens: list[int], budget: int, seed: int) -> TokenTree:
    """Drafts the tree of a drafter without an idea."""
    return TokenTree.root_only(tokens[-1])


async def test_malformed_proposals_are_refused_for_themselves(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        expected = (await router.generate(1, PROMPT, max_tokens=60, speculate=False)).token_ids
        async with SpeculatorPeer(running, lambda tokens, budget, seed: None) as speculator:
            output = await router.submit(2, PROMPT, max_tokens=60)
            await asyncio.wait_for(speculator.assigned.wait(), 5)
            handle = next(iter(speculator.tokens))
            base, root = len(speculator.tokens[handle]), speculator.tokens[handle][-1]
            tree = {"handle": handle, "base_committed_len": base}
            too_many = running.verifier._config.max_nodes + 2
            deep = running.verifier._config.max_depth + 2
            malformed: list[tuple[dict[str, Any], int]] = [
                ({**tree, "token_ids": [], "parents": []}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [-1]}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [0, 0]}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [-1, 1]}, INVALID),
                ({**tree, "token_ids": [root, 5, 6], "parents": [-1, 2, 1]}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [-1, -7]}, INVALID),
                ({**tree, "token_ids": [root, 5, 5], "parents": [-1, 0, 0]}, INVALID),
                ({**tree, "token_ids": [root, 4_000_000_000], "parents": [-1, 0]}, INVALID),
                ({**tree, "token_ids": [root, running.engine.identity.vocab_size], "parents": [-1, 0]}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [-1, 0], "log_probs": [0, float("nan")]}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [-1, 0], "log_probs": [0, 0.5]}, INVALID),
                ({**tree, "token_ids": [root, 5], "parents": [-1, 0], "source_masks": [1, 2]}, INVALID),
                ({**tree, "token_ids": [root] * too_many, "parents": range(-1, too_many - 1)}, INVALID),
                ({**tree, "token_ids": [root] * deep, "parents": range(-1, deep - 1)}, INVALID),
                ({"handle": handle, "base_committed_len": 0, "token_ids": [root], "parents": [-1]}, INVALID),
                ({"handle": handle, "base_committed_len": 9999, "token_ids": [root], "parents": [-1]}, STALE),
                ({"handle": handle, "base_committed_len": 2, "token_ids": [PROMPT[1], 7], "parents": [-1, 0]}, STALE),
                ({**tree, "handle": 12345, "token_ids": [root], "parents": [-1]}, UNKNOWN),
            ]
            for fields, code in malformed:
                await speculator.propose(verifier_pb2.TreeProposal(**fields))
                rejection = await asyncio.wait_for(speculator.rejections.get(), 5)
                assert (rejection.handle, rejection.status.code) == (fields["handle"], code), fields
                assert rejection.status.message
            await asyncio.wait_for(output.finished.wait(), 30)
    assert output.token_ids == expected


async def test_a_flood_of_proposals_ends_the_stream_and_harms_nobody(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router, SpeculatorPeer(running, lambda *_: None) as speculator:
        output = await router.submit(1, PROMPT, max_tokens=60)
        await speculator.propose(*[verifier_pb2.TreeProposal(handle=1)] * 100_000)
        assert await asyncio.wait_for(speculator.call.code(), 5) == grpc.StatusCode.INVALID_ARGUMENT
        assert speculator.rejections.empty()
        await asyncio.wait_for(output.finished.wait(), 30)
        assert len(output.token_ids) == 60


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol_version": 2}, "protocol version 2"),
        ({"model": {"tokenizer_hash": "0" * 64}}, "tokenizer_hash differs"),
        ({"model": {"vocab_size": 7}}, "vocab_size differs"),
        ({"model": {"name": "other"}}, "name differs"),
        ({"model": {"eos_token_ids": [1, 5]}}, "eos_token_ids differs"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    running: RunningVerifier, change: dict[str, Any], reason: str
) -> None:
    if "model" in change:
        model = common_pb2.ModelIdentity()
        model.CopyFrom(running.identity)
        for name, value in change["model"].items():
            if isinstance(value, list):
                model.eos_token_ids[:] = value
            else:
                setattr(model, name, value)
        change = {"model": model}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with SpeculatorPeer(running, lambda *_: None, **change) as speculator:
            await speculator.call.read()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason in (refused.value.details() or "")


async def test_padding_of_the_vocabulary_may_differ(running: RunningVerifier) -> None:
    model = common_pb2.ModelIdentity()
    model.CopyFrom(running.identity)
    model.padded_vocab_size += 64
    async with SpeculatorPeer(running, lambda *_: None, model=model) as speculator:
        assert speculator.welcome.max_nodes > 1


@pytest.mark.parametrize("method", ["Decode", "Draft"])
@pytest.mark.parametrize("first", ["credit", "empty"])
async def test_a_stream_without_a_hello_ends_with_invalid_argument(
    running: RunningVerifier, method: str, first: str
) -> None:
    async with open_channel(running.address) as channel:
        call = getattr(verifier_pb2_grpc.VerifierServiceStub(channel), method)()
        kind = verifier_pb2.DecodeRequest if method == "Decode" else verifier_pb2.DraftRequest
        await call.write(kind(credit=verifier_pb2.Credit(frames=1)) if first == "credit" else kind())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_hello_and_an_oversize_message_end_only_their_own_stream(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as bystander:
        output = await bystander.submit(1, PROMPT, max_tokens=40)
        async with RouterPeer(running.address) as offender:
            await offender.send(hello=verifier_pb2.DecodeHello(protocol_version=1))
            assert await offender.call.code() == grpc.StatusCode.INVALID_ARGUMENT
        async with grpc.aio.insecure_channel(running.address) as channel:  # without our own limit on what is sent
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Draft()
            hello = verifier_pb2.DraftHello(protocol_version=1, model=running.identity, sources=["x"])
            await call.write(verifier_pb2.DraftRequest(hello=hello))
            assert (await call.read()).HasField("welcome")
            huge = verifier_pb2.Proposals(proposals=[tree_message(1, 1, TokenTree.chain(range(400_000)))])
            await call.write(verifier_pb2.DraftRequest(proposals=huge))
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.wait_for(output.finished.wait(), 30)
    assert len(output.token_ids) == 40


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [100_000]}, "prompt_token_ids"),
        ({"generated": [100_000]}, "generated_token_ids"),
        ({"max_tokens": 0}, "stopping.max_tokens"),
        ({"max_tokens": 5000}, "stopping.max_tokens"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"logit_bias": {99_999: 1.0}}, "sampling.logit_bias"),
        ({"stopping": {"stop_token_ids": [99_999]}}, "stopping.stop_token_ids"),
        ({"stopping": {"min_tokens": 500}}, "stopping.min_tokens"),
        ({"generated": list(range(50, 74))}, "generated_token_ids"),
    ],
)
async def test_a_bad_submission_fails_alone(running: RunningVerifier, options: dict[str, Any], field: str) -> None:
    async with RouterPeer(running.address) as router:
        good = await router.submit(1, PROMPT)
        prompt = options.pop("prompt", PROMPT)
        bad = await router.generate(2, prompt, **options)
        await asyncio.wait_for(good.finished.wait(), 30)
    assert bad.end is not None and bad.end.status.code == INVALID
    assert field in bad.end.status.message
    assert len(good.token_ids) == 24


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<extra{i}>" for i in range(20)])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(InvalidArgumentError, match="the tokenizer has 320 ids, the model 306"):
        load_engine(VerifierConfig(model_folder=tmp_path / "model", model_name="tiny"))


async def test_a_handle_in_use_ends_the_stream(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        await router.submit(1, PROMPT, max_tokens=100)
        await router.send(submit=verifier_pb2.Submit(sequences=[submission(1, PROMPT)]))
        assert await router.call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_cancel_frees_blocks_within_a_step_and_nothing_more_arrives(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        output = await router.submit(1, PROMPT, max_tokens=200)
        await until(lambda: len(output.token_ids) >= 3)
        await router.send(cancel=verifier_pb2.Cancel(handles=[1, 77]))
        await until(lambda: router.loads and router.loads[-1].sequences == 0)
        seen = len(output.token_ids)
        assert router.loads[-1].free_blocks == router.loads[-1].total_blocks
        await asyncio.sleep(0.05)
        assert len(output.token_ids) == seen < 200 and output.end is None


async def test_a_router_that_goes_away_leaves_nothing_behind(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        outputs = [await router.submit(h, PROMPT, max_tokens=200) for h in range(8)]
        await until(lambda: all(output.token_ids for output in outputs))


async def test_without_credit_tokens_gather_and_then_come_at_once(running: RunningVerifier) -> None:
    async with RouterPeer(running.address, credit=0) as router:
        outputs = [await router.submit(h, PROMPT, max_tokens=20) for h in range(3)]
        await until(lambda: running.metric("treeserve_verifier_emitted_tokens_total") == 60)
        await asyncio.sleep(0.05)
        assert router.token_frames == 0 and not any(output.token_ids for output in outputs)
        await router.send(credit=verifier_pb2.Credit(frames=1))
        await asyncio.wait_for(asyncio.gather(*(output.finished.wait() for output in outputs)), 10)
        assert router.token_frames == 1
        assert [len(output.token_ids) for output in outputs] == [20, 20, 20]


async def test_commits_gather_while_a_speculator_gives_no_credit(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        async with SpeculatorPeer(running, lambda *_: None, initial_credit=1) as speculator:
            output = await router.submit(1, PROMPT, max_tokens=200)
            await asyncio.wait_for(speculator.assigned.wait(), 5)
            await until(lambda: len(output.token_ids) >= 40)
            assert speculator.commits == []
            await speculator.send(credit=verifier_pb2.Credit(frames=1))
            await until(lambda: speculator.commits)
            assert len(speculator.commits) == 1 and len(speculator.commits[0].token_ids) > 32, (
                "an ask and its repetition"
            )
            await asyncio.wait_for(output.finished.wait(), 30)


async def test_top_tokens_come_with_commits_when_asked_for(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router:
        async with SpeculatorPeer(running, no_idea, wants_top_tokens=True) as speculator:
            output = await router.generate(1, PROMPT, max_tokens=16)
            commits = [c for c in speculator.commits if c.handle == 1]
    top = [t for commit in commits for t in commit.top_tokens]
    committed = [t for commit in commits for t in commit.token_ids]
    assert committed == output.token_ids[: len(committed)] and len(top) == len(committed) > 0
    assert all(t.token_ids[0] == token and len(set(t.token_ids)) == 8 for t, token in zip(top, committed, strict=True))


async def test_updates_say_what_the_verifier_pays(running: RunningVerifier) -> None:
    async with RouterPeer(running.address) as router, SpeculatorPeer(running, no_idea) as speculator:
        await router.generate(1, PROMPT, max_tokens=8)
    assert speculator.prices, "where rows are free, as here, a token takes ages"
    assert all(price.token_us > 1e6 and price.node == 0.0 for price in speculator.prices)

    stream = DraftStream(credit=1, prices=lambda: Prices(token_s=0.004, row=0.1, node=0.03))
    stream.release(1)
    update = (await anext(stream.frames())).update
    assert (update.prices.token_us, update.prices.node) == pytest.approx((4000.0, 0.03))


async def test_too_many_waiting_sequences_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path, max_sequences=2, max_waiting=3) as small:
        async with RouterPeer(small.address) as router:
            outputs: list[Output] = []
            router.outputs.update({h: Output() for h in range(12)})
            batch = [submission(h, PROMPT, max_tokens=60) for h in range(12)]
            await router.send(submit=verifier_pb2.Submit(sequences=batch))
            outputs = list(router.outputs.values())
            await asyncio.wait_for(asyncio.gather(*(o.finished.wait() for o in outputs)), 30)
        refused = [o for o in outputs if o.end is not None and o.end.status.code == code_pb2.RESOURCE_EXHAUSTED]
        assert refused and len(refused) == sum(1 for o in outputs if not o.token_ids)
