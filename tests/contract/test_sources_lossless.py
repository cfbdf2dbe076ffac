"""Every draft source alone and all of them together, and sources that misbehave: they change how soon, never what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from support import hostile_functions
from support.speculators import attached, drafting, speculator_process
from support.tiny_drafters import TRAINED, write_drafters
from support.verifier_peers import Output, RouterPeer, RunningVerifier, running_verifier, until

from treeserve_core.tree import TokenTree
from treeserve_kernels.cpu import library
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.suffix import SuffixSource
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.corpus import build_corpus

PROMPT = [10, 20, 30, 40, 50]
REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.3},
    {"temperature": 1.0, "top_k": 20},
]
TOKENS = 40
HOSTILE = [f"support.hostile_functions:{function.__name__}" for function in hostile_functions.REASONS]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where int8 weights are kept from one test to the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def running(tiny_model: Path, tmp_path: Path, cache: Path) -> AsyncIterator[RunningVerifier]:
    async with running_verifier(tiny_model, tmp_path, dtype="auto", cache_dir=cache, draft_wait_ms=500.0) as verifier:
        yield verifier
        await until(lambda: verifier.verifier.loop.load().sequences == 0)
        verifier.check_all_blocks_free()


async def decoded(router: RouterPeer, first_handle: int, tenant: str = "t", **options: Any) -> list[Output]:
    """All requests side by side."""
    runs = (
        router.generate(
            first_handle + i, [*PROMPT, i], max_tokens=TOKENS, seed=i, stopping={"ignore_eos": True}, tenant=tenant,
            **request, **options,
        )
        for i, request in enumerate(REQUESTS)
    )  # fmt: skip
    return await asyncio.gather(*runs)


def tokens_of(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def accepted(outputs: Sequence[Output]) -> int:
    return sum(output.end.speculation.accepted for output in outputs if output.end is not None)


@pytest.fixture(scope="module")
def corpus(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in which every token follows some other."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = Tokenizer.from_folder(tiny_model)
    (folder / "text.txt").write_text("".join(chr(33 + i * j % 90) for i in range(1, 90) for j in range(90)))
    build_corpus([folder / "text.txt"], tokenizer, folder / "corpus")
    return folder / "corpus"


def drafted(registry: CollectorRegistry, source: str) -> float:
    return registry.get_sample_value("treeserve_speculator_nodes_total", {"source": source}) or 0.0


@pytest.fixture(scope="module")
def drafters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters of every trained kind."""
    if not library.is_built():
        pytest.skip("the native decoder is not built")
    return write_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


BUILT_IN = ("ngram", "suffix", "recycling", "corpus", *TRAINED)


@pytest.mark.parametrize("sources", [*((name,) for name in BUILT_IN), BUILT_IN], ids="+".join)
async def test_built_in_sources_change_no_token(
    running: RunningVerifier, tiny_model: Path, corpus: Path, drafters: Path, cache: Path, sources: tuple[str, ...]
) -> None:
    files: dict[str, Any] = {"cache_dir": cache, "drafter_folder": drafters, "ssm_kv_tokens": 4096}
    if "corpus" in sources:
        files["corpus"] = corpus
    async with RouterPeer(running.address) as router:
        plain = await decoded(router, 0, speculate=False)
        async with drafting(running, tiny_model, *sources, **files) as registry:
            for round_ in (1, 2):  # the second time, what was said before is known
                outputs = await decoded(router, 10 * round_)
                assert tokens_of(outputs) == tokens_of(plain)
    assert accepted(plain) == 0
    for source in sources:
        assert drafted(registry, source) > 0, f"{source} had no say"
    if not {"suffix", "ssm"}.isdisjoint(sources):
        assert accepted(outputs) > TOKENS


@pytest.mark.timeout(120)
async def test_hostile_functions_change_no_token_and_end_no_process(running: RunningVerifier, tiny_model: Path) -> None:
    others = ("support.hostile_functions:Meddler", "support.hostile_functions:endless", "suffix")
    async with (
        RouterPeer(running.address) as router,
        speculator_process(running, tiny_model, *HOSTILE, *others, source_budget_ms=2000.0) as speculator,
    ):
        plain = await decoded(router, 0, speculate=False)
        for round_ in (1, 2, 3):
            outputs = await decoded(router, 10 * round_)
            assert tokens_of(outputs) == tokens_of(plain)
        assert accepted(outputs) > TOKENS, "the well-behaved source drafts as if it were alone"
        assert speculator.is_running
        faults = await speculator.faults()
        for function, reason in hostile_functions.REASONS.items():
            assert faults[function.__name__, reason] > 0


@pytest.mark.timeout(120)
async def test_functions_that_hang_are_given_up_and_change_no_token(running: RunningVerifier, tiny_model: Path) -> None:
    hanging = ("support.hostile_functions:spins", "support.hostile_functions:hangs")
    async with (
        RouterPeer(running.address) as router,
        speculator_process(running, tiny_model, "suffix", *hanging) as speculator,
    ):
        plain = await decoded(router, 0, speculate=False)
        for round_ in (1, 2, 3):
            outputs = await decoded(router, 10 * round_)
            assert tokens_of(outputs) == tokens_of(plain)
        assert accepted(outputs) > TOKENS, "the well-behaved source drafts as if it were alone"
        assert speculator.is_running
        faults = await speculator.faults()
        assert faults["spins", "late"] > 0 and faults["hangs", "late"] > 0


async def test_no_tenant_is_drafted_from_anothers_output(
    running: RunningVerifier, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees: dict[tuple[int, int], TokenTree | None] = {}  # by committed length and budget
    propose = SuffixSource.propose

    def noting(source: SuffixSource, state: DraftSequence, budget: int) -> TokenTree | None:
        tree = trees[len(state.tokens), budget] = propose(source, state, budget)
        return tree

    async def trees_for(handle: int, tenant: str) -> dict[tuple[int, int], TokenTree | None]:
        trees.clear()
        await router.generate(handle, PROMPT, max_tokens=TOKENS, stopping={"ignore_eos": True}, tenant=tenant)
        await until(lambda: closed)
        closed.clear()
        return dict(trees)

    closed: list[int] = []
    close = SuffixSource.close
    monkeypatch.setattr(SuffixSource, "propose", noting)
    monkeypatch.setattr(SuffixSource, "close", lambda source, state: (close(source, state), closed.append(1)))
    async with RouterPeer(running.address) as router, drafting(running, tiny_model, "suffix"):
        first = await trees_for(1, "one")
        for handle, tenant in enumerate(("two", "", ""), start=2):
            other = await trees_for(handle, tenant)
            both = first.keys() & other.keys()
            assert both and all(first[key] == other[key] for key in both), "as if nobody had asked before"
        again = await trees_for(5, "one")
        assert any(first[key] != again[key] for key in first.keys() & again.keys())


async def test_two_speculators_draft_for_one_sequence_and_either_may_die(
    running: RunningVerifier, tiny_model: Path, corpus: Path, tmp_path: Path
) -> None:
    async with RouterPeer(running.address) as router:
        plain = await decoded(router, 0, speculate=False)
        async with AsyncExitStack() as stack:
            speculators = [
                await stack.enter_async_context(speculator_process(running, tiny_model, *sources, **files))
                for sources, files in ((("suffix",), {}), (("corpus",), {"corpus": corpus, "cache_dir": tmp_path}))
            ]
            desk = running.verifier.loop._desk
            masks: set[int] = set()
            merged = desk.tree
            desk.tree = lambda sequence: _noting(merged(sequence), masks)  # type: ignore[method-assign]
            await decoded(router, 10)
            assert tokens_of(await decoded(router, 20)) == tokens_of(plain)
            assert {0b01, 0b10} <= masks, "nodes of each, in one tree"
            for handle, speculator in zip((30, 40), speculators, strict=True):
                decoding = asyncio.create_task(decoded(router, handle))
                await until(lambda handle=handle: len(router.outputs.get(handle, Output()).token_ids) > 5)
                assert not decoding.done()
                speculator.process.kill()
                assert tokens_of(await decoding) == tokens_of(plain)
            await until(lambda: attached(running) == 0)


def _noting(tree: Any, masks: set[int]) -> Any:
    """The tree; if several sources are in it, their masks are noted."""
    found = set(tree.source_masks[1:]) if tree is not None and tree.source_masks else set()
    if len(found) > 1:
        masks |= found
    return tree


async def test_a_speculator_with_another_tokenizer_is_refused_and_its_log_says_why(
    running: RunningVerifier, tiny_model: Path, tmp_path: Path
) -> None:
    other = _copy(tiny_model, tmp_path / "other")
    tokenizer = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_special_tokens(["<another>"])
    tokenizer.save(str(other / "tokenizer.json"))
    with capture_logs() as logs, pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), drafting(running, other, "ngram"):
            pass
    refusals = [entry["reason"] for entry in logs if entry["event"] == "verifier refused the handshake"]
    assert refusals and all("tokenizer_hash differs" in reason for reason in refusals)
    assert attached(running) == 0


async def test_a_speculator_whose_vocabulary_is_padded_differently_drafts(
    running: RunningVerifier, tiny_model: Path, tmp_path: Path
) -> None:
    padded = _copy(tiny_model, tmp_path / "padded")
    config = (padded / "config.json").read_text()
    assert '"vocab_size": 306' in config
    (padded / "config.json").write_text(config.replace('"vocab_size": 306', '"vocab_size": 384'))
    async with RouterPeer(running.address) as router, drafting(running, padded, "suffix"):
        plain = await decoded(router, 0, speculate=False)
        await decoded(router, 10)
        outputs = await decoded(router, 20)
        assert tokens_of(outputs) == tokens_of(plain) and accepted(outputs) > TOKENS


def _copy(model: Path, folder: Path) -> Path:
    """What a speculator reads of a model."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((model / name).read_text())
    return folder
