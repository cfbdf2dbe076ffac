"""Hidden states on their way from the verifier to a speculator: exact, bounded, checked, and only where wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.speculators import drafting
from support.verifier_peers import TIMEOUT_S, RouterPeer, RunningVerifier, SpeculatorPeer, running_verifier, until

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu import library
from treeserve_speculator.messages import committed_from_proto, sequence_from_proto
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.head_export import export_head
from treeserve_training.head_model import HeadModel
from treeserve_training.ssm_export import drafter_target
from treeserve_verifier.cost_model import Prices
from treeserve_verifier.draft_stream import DraftStream
from treeserve_verifier.speculator import CommitNotice
from treeserve_wire import draft_codec
from treeserve_wire.channel import MAX_MESSAGE_BYTES

SHAPE = FeatureShape((1, 3), 4)
PROMPT = [*range(5, 95)]


def some_rows(tokens: int = 3, first: int = 7) -> FeatureRows:
    values = np.random.default_rng(tokens).standard_normal((tokens, *SHAPE.row_shape))
    return FeatureRows.narrowed(first, values.astype(np.float32))


def test_they_travel_unchanged():
    rows = some_rows()
    message = verifier_pb2.Features.FromString(draft_codec.features_to_proto(rows).SerializeToString())
    back = draft_codec.features_from_proto(message, SHAPE)
    assert back.first == rows.first and back.values.dtype == np.float16
    assert back.values.tobytes() == rows.values.tobytes() and back.values.shape == rows.values.shape
    assert draft_codec.feature_shape_from_proto(draft_codec.feature_shape_to_proto(SHAPE)) == SHAPE


def flipped(message: verifier_pb2.Features) -> None:
    message.values = bytes([message.values[0] ^ 1]) + message.values[1:]


DAMAGE: dict[str, Callable[[verifier_pb2.Features], Any]] = {
    "a flipped bit": flipped,
    "another checksum": lambda m: setattr(m, "crc32", m.crc32 ^ 1),
    "fewer bytes": lambda m: setattr(m, "values", m.values[:-2]),
    "fewer tokens": lambda m: setattr(m, "tokens", m.tokens - 1),
    "no tokens": lambda m: (setattr(m, "tokens", 0), setattr(m, "values", b""), setattr(m, "crc32", 0)),
    "too many tokens": lambda m: setattr(m, "tokens", 2**32 - 1),
    "another width": lambda m: (setattr(m, "hidden_size", 8), setattr(m, "layers", 1)),
    "another type": lambda m: setattr(m, "dtype", "bfloat16"),
    "not finite": lambda m: m.CopyFrom(
        draft_codec.features_to_proto(FeatureRows(7, np.full((3, *SHAPE.row_shape), np.inf, np.float16)))
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_ones_cost_a_sequence_its_features_and_nothing_else(damage):
    message = draft_codec.features_to_proto(some_rows())
    DAMAGE[damage](message)
    with pytest.raises(InvalidArgumentError, match="features"):
        draft_codec.features_from_proto(message, SHAPE)
    commit = verifier_pb2.Commit(handle=1, base_committed_len=3, token_ids=[5], features=[message])
    committed = committed_from_proto(commit, 100, SHAPE)
    assert committed.token_ids == (5,) and committed.features is None
    assignment = verifier_pb2.Assignment(handle=1, token_ids=[5, 6], features=[message])
    assert sequence_from_proto(assignment, 100, SHAPE).features is None
    assert sequence_from_proto(assignment, 100).features is not None, "who did not ask does not look at them"


async def next_updates(stream: DraftStream) -> list[verifier_pb2.DraftUpdate]:
    """All that is due now."""
    updates: list[verifier_pb2.DraftUpdate] = []

    async def read() -> None:
        async for frame in stream.frames():
            updates.append(frame.update)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    return updates


async def test_frames_stay_small_and_gathered_features_are_the_latest():
    wide = FeatureShape((1,), 2**16)  # 128 KiB a token
    stream = DraftStream(credit=0, prices=lambda: Prices(token_s=0.004, row=0.1))
    for handle in range(1, 9):
        for base in range(10, 16):  # while credit is out
            stream.commit(CommitNotice(handle, base, (base,), 4))
            stream.features(handle, FeatureRows(base, np.full((1, 1, 2**16), base, np.float16)))
    assert await next_updates(stream) == []
    stream.grant(100)
    updates = await next_updates(stream)
    commits = [commit for update in updates for commit in update.commits]
    assert [commit.handle for commit in commits] == list(range(1, 9))
    assert all(update.ByteSize() < MAX_MESSAGE_BYTES for update in updates)
    for commit in commits:
        blocks = [draft_codec.features_from_proto(block, wide) for block in commit.features]
        assert [block.first for block in blocks] == [14, 15] and list(commit.token_ids) == list(range(10, 16))


def reference(tiny_model: Path, tokens: list[int]) -> np.ndarray:
    """Features by the token that they belong to, float16[tokens + 1, D, H]; none for the first."""
    model = load_model(tiny_model, dtype="float32", device="cpu", threads=1)
    runner = ModelRunner(model, num_blocks=64, block_size=16)
    runner.blocks.add(0)
    runner.blocks.reserve(0, len(tokens))
    rows = SequenceRows.from_chain(0, tokens, [])
    rows = SequenceRows(0, rows.token_ids, rows.depths, rows.ancestor_words, [], feature_rows=range(len(tokens)))
    (states,) = runner.forward_hidden([rows], model.feature_shape.layers)
    return np.concatenate([np.zeros_like(states.features[:1]), states.features]).astype(np.float16)


def sent(speculator: SpeculatorPeer, shape: FeatureShape) -> list[FeatureRows]:
    entries = [*speculator.assignments, *speculator.commits]
    return [draft_codec.features_from_proto(block, shape) for entry in entries for block in entry.features]


def wanted(running: RunningVerifier) -> FeatureShape:
    shape = running.verifier.loop.feature_shape
    assert shape is not None and len(shape.layers) >= 1
    return shape


async def test_a_speculator_gets_those_of_every_token_and_of_the_end_of_the_prompt(tiny_model, tmp_path):
    async with (
        running_verifier(tiny_model, tmp_path, prefill_rows=24, max_sequences=8, step_rows=24) as running,
        RouterPeer(running.address) as router,
    ):
        shape = wanted(running)
        plain = (await router.generate(1, PROMPT, max_tokens=40, seed=3, temperature=0.9)).token_ids
        whole = [*PROMPT, *plain]

        def draft(tokens: list[int], budget: int, seed: int) -> TokenTree:
            """Two right tokens behind a wrong sibling, sometimes only wrong ones."""
            a, b = (*whole[len(tokens) : len(tokens) + 2], 1, 1)[:2]
            right = a if len(tokens) % 5 else (a + 1) % 200
            return TokenTree((tokens[-1], (right + 7) % 200, right, b), (-1, 0, 0, 2), (0.0, -0.1, -0.1, -0.1))

        hello = {"wants_features": draft_codec.feature_shape_to_proto(shape)}
        async with (
            SpeculatorPeer(running, draft, **hello) as speculator,
            SpeculatorPeer(running, lambda *_: None, sources=["other"]) as modest,
        ):
            assert draft_codec.feature_shape_from_proto(speculator.welcome.features) == shape
            output = await router.generate(2, PROMPT, max_tokens=40, seed=3, temperature=0.9)
            await until(lambda: len(speculator.released) == 1)
            blocks = sent(speculator, shape)
            assert not sent(modest, shape), "it did not ask"
        assert output.token_ids == plain, "to export them changes no token"
        assert output.end is not None and output.end.speculation.accepted > 10
    expected = reference(tiny_model, whole)
    told = max(len(tokens) for tokens in speculator.tokens.values())
    got = [place for block in blocks for place in range(block.first, block.first + len(block.values))]
    assert got == list(range(len(PROMPT) + 1 - shape.window_tokens, told)), "no gap, no repeat, the prompt's last ones"
    for block in blocks:
        np.testing.assert_array_equal(block.values, expected[block.first : block.first + len(block.values)])


async def test_an_heir_gets_the_latest_with_its_assignment(tiny_model, tmp_path):
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        shape = wanted(running)
        hello = {"wants_features": draft_codec.feature_shape_to_proto(shape)}
        async with SpeculatorPeer(running, lambda *_: None, **hello) as first:
            output = await router.submit(1, PROMPT, max_tokens=150)
            await until(lambda: len(first.commits) > 1)
            second = SpeculatorPeer(running, lambda *_: None, **hello)
            await second.__aenter__()
        await asyncio.wait_for(second.assigned.wait(), TIMEOUT_S)
        await asyncio.wait_for(output.finished.wait(), TIMEOUT_S)
        (assignment,) = second.assignments
        blocks = [draft_codec.features_from_proto(block, shape) for block in assignment.features]
        assert sum(len(block.values) for block in blocks) == shape.window_tokens
        assert blocks[-1].first + len(blocks[-1].values) == len(assignment.token_ids)
        await second.__aexit__()
    np.testing.assert_array_equal(
        blocks[0].values, reference(tiny_model, list(assignment.token_ids))[blocks[0].first :][: len(blocks[0].values)]
    )


async def test_who_wants_another_shape_is_sent_none(tiny_model, tmp_path):
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        shape = wanted(running)
        other = draft_codec.feature_shape_to_proto(FeatureShape(shape.layers, shape.hidden_size + 1))
        async with SpeculatorPeer(running, lambda *_: None, wants_features=other) as speculator:
            await router.generate(1, PROMPT, max_tokens=30)
            await until(lambda: len(speculator.released) == 1)
            assert speculator.commits and not any(entry.features for entry in speculator.commits)


async def test_a_model_that_shows_none_says_so(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("treeserve_engine.model.LlamaModel.feature_shape", FeatureShape((), 1))
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        wants = draft_codec.feature_shape_to_proto(FeatureShape((), 1))
        async with SpeculatorPeer(running, lambda *_: None, wants_features=wants) as speculator:
            assert not speculator.welcome.HasField("features")
            output = await router.generate(1, PROMPT, max_tokens=30)
            assert len(output.token_ids) == 30


@pytest.fixture(scope="module")
def drafters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was never trained."""
    known = Tokenizer.from_folder(tiny_model).vocab_size
    vocabulary = DraftVocabulary(np.arange(known), load_config(tiny_model).vocab_size)
    model = HeadModel.from_target(tiny_model, FeatureShape.of_model(2, 48), vocabulary)
    folder = tmp_path_factory.mktemp("drafters")
    target = drafter_target(tiny_model, "tiny")
    export_head(model, vocabulary, folder=folder, target=target, licence="Apache-2.0", recipe={})
    return folder


@pytest.mark.skipif(not library.is_built(), reason="the native decoder is not built")
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
async def test_a_head_drafts_with_them_and_is_silent_without(tiny_model, drafters, tmp_path, monkeypatch, damaged):
    """Nothing of it shows in the tokens, and other sources go on."""
    encode = draft_codec.features_to_proto

    def broken(rows: FeatureRows) -> verifier_pb2.Features:
        message = encode(rows)
        message.crc32 ^= 1
        return message

    if damaged:
        monkeypatch.setattr("treeserve_verifier.draft_stream.draft_codec.features_to_proto", broken)
    verifier = running_verifier(tiny_model, tmp_path, dtype="int8", cache_dir=tmp_path)
    async with verifier as running, RouterPeer(running.address) as router:
        plain = [await router.generate(i, PROMPT[i:], max_tokens=60, seed=i, temperature=i / 2) for i in range(3)]
        sources = drafting(running, tiny_model, "head", "suffix", drafter_folder=drafters, cache_dir=tmp_path)
        async with sources as registry:
            for i, expected in enumerate(plain):
                output = await router.generate(10 + i, PROMPT[i:], max_tokens=60, seed=i, temperature=i / 2)
                assert output.token_ids == expected.token_ids
        nodes = {
            s: registry.get_sample_value("treeserve_speculator_nodes_total", {"source": s}) for s in ("head", "suffix")
        }
        wrong = registry.get_sample_value("treeserve_speculator_damaged_features_total")
        failures = registry.get_sample_value("treeserve_speculator_source_failures_total", {"source": "head"})
    assert failures in (None, 0.0)
    assert (
        (nodes["head"] or 0) > 100 and wrong == 0 if not damaged else nodes["head"] in (None, 0) and (wrong or 0) >= 3
    )
    assert (nodes["suffix"] or 0) > 0
