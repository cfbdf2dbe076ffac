"""The speculator's way to a verifier: hello, reconnecting, refusals, and how a stream and the process end."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path

import pytest
from support.draft_rig import (
    IDENTITY,
    TIMEOUT_S,
    VOCAB,
    DraftVerifier,
    ScriptedSource,
    Speculator,
    StartSpeculator,
    assignment,
    commit,
    next_tokens,
    serve,
)

from treeserve_core.errors import HandshakeError
from treeserve_core.identity import PROTOCOL_VERSION
from treeserve_speculator.conversation import CREDIT_WINDOW
from treeserve_speculator.sources.ngram import NgramSource
from treeserve_speculator.sources.recycling import RecyclingSource
from treeserve_speculator.sources.suffix import SuffixSource
from treeserve_wire.backoff import Backoff
from treeserve_wire.codec import identity_from_proto


async def test_hello_names_model_sources_and_wishes(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(NgramSource(), SuffixSource(), RecyclingSource(VOCAB))
    hello = (await draft_verifier.next_stream()).hello
    assert hello.protocol_version == PROTOCOL_VERSION
    assert identity_from_proto(hello.model) == IDENTITY
    assert list(hello.sources) == ["ngram", "suffix", "recycling"]
    assert hello.wants_top_tokens and hello.initial_credit == CREDIT_WINDOW


async def test_a_broken_frame_ends_the_stream_and_a_new_one_opens(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(ScriptedSource(next_tokens))
    for break_stream in (lambda s: s.welcome(), lambda s: s.send()):
        stream = await draft_verifier.next_stream()
        await stream.welcome()
        await break_stream(stream)
        stream.end()
    await draft_verifier.next_stream()


async def test_reconnects_after_ends_and_errors_with_fresh_sequences(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    speculator = start_speculator(ScriptedSource(next_tokens))
    for error in (None, RuntimeError("boom"), TimeoutError("slow")):
        stream = await draft_verifier.next_stream()
        await stream.welcome()
        await stream.update(assignments=[assignment(1, [5])])
        assert set(await stream.proposals()) == {1}
        stream.end(error)
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(commits=[commit(1, 1, [6])], assignments=[assignment(2, [7])])
    assert set(await stream.proposals()) == {2}, "handles end with their stream"
    assert speculator.count("sequences") == 1 and speculator.count("streams") == 1


async def test_finds_a_verifier_that_comes_later(draft_verifier: DraftVerifier, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/late"
    speculator = Speculator(address, ScriptedSource(next_tokens))
    await asyncio.sleep(0.2)
    server = await serve(draft_verifier, address)
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await server.drain(0)
    server = await serve(draft_verifier, address)
    await draft_verifier.next_stream()
    await speculator.stop()
    await server.drain(0)


async def test_a_refused_handshake_is_retried_slowly(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    start_speculator(ScriptedSource(next_tokens), refused_s=0.5)
    (await draft_verifier.next_stream()).end(HandshakeError("tokenizer_hash differs"))
    with pytest.raises(TimeoutError):
        await draft_verifier.next_stream(timeout_s=0.3)
    await draft_verifier.next_stream()


def test_backoff_doubles_to_its_limit_with_jitter() -> None:
    backoff, rng = Backoff(), random.Random(1)
    for failures, base in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.5), (10_000, 0.5)):
        waits = [backoff.wait_s(failures, rng) for _ in range(50)]
        assert base / 2 <= min(waits) < max(waits) <= base


async def test_stop_closes_the_stream_from_our_side(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeserve_speculator.draft_client._STOP_GRACE_S", 2 * TIMEOUT_S)  # after which it is cut
    speculator = start_speculator(ScriptedSource(next_tokens))
    stream = await draft_verifier.next_stream()
    await stream.welcome()
    await stream.update(assignments=[assignment(1, [5])])
    await stream.proposals()
    speculator.client.stop()
    assert await stream.read() is None
    stream.end()
    await asyncio.wait_for(speculator.task, TIMEOUT_S)
    assert speculator.count("sequences") == 0 and speculator.count("streams") == 0


async def test_stop_does_not_wait_for_a_verifier_that_hangs(
    draft_verifier: DraftVerifier, start_speculator: StartSpeculator
) -> None:
    speculator = start_speculator(ScriptedSource(next_tokens))
    await (await draft_verifier.next_stream()).welcome()
    await asyncio.wait_for(speculator.stop(), 5)


def _write_target(folder: Path) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {chr(97 + i): i for i in range(26)} | {"</s>": 26}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 26, "content": "</s>", "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
        ],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "truncation": None, "padding": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": 26}))


async def test_the_process_serves_and_ends_on_sigterm(
    draft_verifier: DraftVerifier, draft_address: str, tmp_path: Path
) -> None:
    _write_target(tmp_path / "model")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "treeserve_speculator",
        *("--model-folder", str(tmp_path / "model"), "--model-name", "letters"),
        *("--verifiers", draft_address, "--listen", f"unix:{tmp_path}/health"),
    )
    try:
        stream = await draft_verifier.next_stream(timeout_s=30)
        model = stream.hello.model
        assert (model.name, model.vocab_size, model.padded_vocab_size) == ("letters", 27, 32)
        assert list(model.eos_token_ids) == [26]
        await stream.welcome()
        await stream.update(assignments=[assignment(1, [1, 2, 3, 1, 2])])
        assert list((await stream.proposals())[1].token_ids)[:2] == [2, 3]
        process.send_signal(signal.SIGTERM)
        assert await stream.read() is None
        stream.end()
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
