"""Structured output at a verifier: it keeps to the grammar whatever is drafted, refused or taken over."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from google.rpc import code_pb2, error_details_pb2
from support.grammar_cases import JSON
from support.router_requests import request
from support.router_rig import running_router
from support.tree_shapes import SHAPES
from support.verifier_peers import Output, RouterPeer, RunningVerifier, SpeculatorPeer, running_verifier

from treeserve.common.v1 import common_pb2 as common
from treeserve_core.grammar import Grammar
from treeserve_core.tree import TokenTree
from treeserve_text.grammar import GrammarCompiler, GrammarMatcher

PROMPT = [10, 20, 30, 40, 50]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
]


def text_of(running: RunningVerifier, output: Output) -> str:
    return running.engine.tokenizer.decode(output.token_ids)


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "kind"}
        and len(value["name"]) <= 5
        and value["kind"] in ("the quick fox", "the lazy dog")
    )


def error_of(output: Output) -> tuple[int, str]:
    """Code and field of the refusal it ended in."""
    assert output.end is not None and output.end.HasField("status")
    for packed in output.end.status.details:
        bad = error_details_pb2.BadRequest()
        if packed.Unpack(bad):
            return output.end.status.code, bad.field_violations[0].field
    return output.end.status.code, ""


class TestVerifier:
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_trees_change_nothing(self, running: RunningVerifier, shape: str) -> None:
        requests = [{**v, "seed": seed, "grammar": JSON, "top_log_probs": 2} for seed, v in enumerate(VARIANTS * 2)]
        truth: dict[int, list[int]] = {}
        rng = random.Random(5)

        def draft(tokens: list[int], budget: int, seed: int) -> TokenTree | None:
            vocab = running.engine.identity.vocab_size
            return SHAPES[shape](tokens[-1], truth[seed][len(tokens) :], budget, vocab, rng)

        async with RouterPeer(running.address) as router:
            plain = await asyncio.gather(
                *(router.generate(h, [*PROMPT, h], max_tokens=80, speculate=False, **r) for h, r in enumerate(requests))
            )
            truth |= {h: [*PROMPT, h, *output.token_ids] for h, output in enumerate(plain)}
            async with SpeculatorPeer(running, draft) as speculator:
                drafted = await asyncio.gather(
                    *(router.generate(100 + h, [*PROMPT, h], max_tokens=80, **r) for h, r in enumerate(requests))
                )
        whole = 0
        for before, after in zip(plain, drafted, strict=True):
            assert (after.token_ids, after.log_probs) == (before.token_ids, before.log_probs)
            assert before.end is not None and after.end is not None and after.end.reason == before.end.reason
            if before.end.reason == common.FINISH_REASON_STOP:
                assert is_of_schema(text_of(running, before))
                whole += 1
        assert whole >= 4
        accepted = sum(output.end.speculation.accepted for output in drafted if output.end is not None)
        assert accepted > 10 or shape == "misleading"
        assert not any(assignment.sampling.HasField("grammar") for assignment in speculator.assignments)

    @pytest.mark.parametrize("variant", VARIANTS)
    async def test_what_a_grammar_forces_needs_no_speculator_and_no_step(
        self, running: RunningVerifier, variant: dict[str, Any]
    ) -> None:
        async with RouterPeer(running.address) as router:
            plain = await router.generate(1, PROMPT, max_tokens=80, speculate=False, grammar=JSON, **variant)
            forced = await router.generate(2, PROMPT, max_tokens=80, grammar=JSON, **variant)
        assert forced.token_ids == plain.token_ids
        assert plain.end is not None and forced.end is not None
        assert plain.end.speculation.steps == len(plain.token_ids)
        stats = forced.end.speculation
        assert stats.accepted == stats.drafted > 5, "what is forced is accepted"
        assert stats.steps == len(forced.token_ids) - stats.accepted

    @pytest.mark.parametrize("variant", VARIANTS[:2])
    async def test_another_verifier_goes_on_with_the_same_tokens(
        self, running: RunningVerifier, tiny_model: Path, tmp_path: Path, variant: dict[str, Any]
    ) -> None:
        options = {**variant, "grammar": JSON, "max_tokens": 80, "seed": 3}
        (tmp_path / "other").mkdir()
        async with (
            running_verifier(tiny_model, tmp_path / "other") as other,
            RouterPeer(running.address) as router,
            RouterPeer(other.address) as second,
        ):
            full = (await router.generate(1, PROMPT, **options)).token_ids
            assert len(full) > 8
            for cut in range(1, len(full), 3):
                rest = await second.generate(cut, PROMPT, generated=full[:cut], **options)
                assert rest.token_ids == full[cut:], cut

    async def test_preemption_keeps_the_place(self, tiny_model: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = {"grammar": JSON, "max_tokens": 60, "temperature": 1.0}
        async with (
            running_verifier(tiny_model, tmp_path, kv_tokens=192, block_size=4, max_context_tokens=96) as small,
            RouterPeer(small.address) as router,
        ):
            alone = [await router.generate(h, [*PROMPT, h], seed=h, **options) for h in range(6)]
            together = await asyncio.gather(
                *(router.generate(10 + h, [*PROMPT, h], seed=h, **options) for h in range(6))
            )
            assert small.metric("treeserve_verifier_preemptions_total") > 0
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]

    @pytest.mark.parametrize(
        ("grammar", "field"),
        [
            (common.Grammar(), "sampling.grammar"),
            (common.Grammar(json_object=False), "sampling.grammar.json_object"),
            (common.Grammar(regex="(a"), "sampling.grammar.regex"),
            (common.Grammar(regex="a" * 70_000), "sampling.grammar.regex"),
            (common.Grammar(lark="start: nothing"), "sampling.grammar.lark"),
            (common.Grammar(json_schema="[]"), "sampling.grammar.json_schema"),
            (common.Grammar(json_schema='{"multipleOf": 9999991}'), "sampling.grammar.json_schema"),
            (common.Grammar(choice=common.Choice()), "sampling.grammar.choice"),
        ],
    )
    async def test_what_means_nothing_harms_nobody_else(
        self, running: RunningVerifier, grammar: common.Grammar, field: str
    ) -> None:
        async with RouterPeer(running.address) as router:
            other = await router.submit(1, PROMPT)
            refused = await router.generate(2, PROMPT, grammar=grammar)
            await asyncio.wait_for(other.finished.wait(), 30)
        assert error_of(refused) == (code_pb2.INVALID_ARGUMENT, field)
        assert len(other.token_ids) == 24

    async def test_output_that_is_not_the_grammars_is_refused(self, running: RunningVerifier) -> None:
        async with RouterPeer(running.address) as router:
            refused = await router.generate(1, PROMPT, generated=[40, 41], grammar=common.Grammar(regex="x+"))
        assert error_of(refused) == (code_pb2.INVALID_ARGUMENT, "sampling.grammar.regex")

    async def test_a_complete_output_ends_at_once(self, running: RunningVerifier) -> None:
        async with RouterPeer(running.address) as router:
            whole = await router.generate(1, PROMPT, max_tokens=80, grammar=JSON)
            assert whole.end is not None and whole.end.reason == common.FINISH_REASON_STOP
            again = await router.generate(2, PROMPT, max_tokens=80, grammar=JSON, generated=whole.token_ids)
        assert again.end is not None and not again.end.HasField("status") and not again.token_ids
        assert again.end.reason == common.FINISH_REASON_STOP

    async def test_only_what_is_otherwise_right_is_compiled(
        self, running: RunningVerifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(GrammarCompiler, "matcher", lambda *_: pytest.fail("compiled"))
        async with RouterPeer(running.address) as router:
            refused = await router.generate(1, [], grammar=JSON)
        assert error_of(refused) == (code_pb2.INVALID_ARGUMENT, "prompt_token_ids")

    async def test_a_client_can_resume_a_complete_output(self, running: RunningVerifier, tmp_path: Path) -> None:
        async with running_router(tmp_path, running.engine.tokenizer, [running], model_name="tiny") as rig:
            asked = request(80, sampling=common.SamplingParameters(grammar=JSON))
            whole = await rig.generate(asked)
            asked.generated_token_ids.extend(whole.token_ids)
            again = await rig.generate(asked)
        assert whole.token_ids and not again.token_ids
        assert whole.finished is not None and again.finished is not None
        assert again.finished.reason == whole.finished.reason == common.FINISH_REASON_STOP
        assert again.finished.usage.completion_tokens == len(whole.token_ids)

    async def test_a_grammar_may_begin_in_the_first_step_of_many(self, running: RunningVerifier) -> None:
        """One with a grammar joins a batch of others: it alone keeps to it, from its first token on."""
        async with RouterPeer(running.address) as router:
            others = [await router.submit(h, [*PROMPT, h], max_tokens=40) for h in range(4)]
            chosen = await router.generate(
                9, PROMPT, grammar=common.Grammar(choice=common.Choice(texts=["fox", "dog"]))
            )
            await asyncio.wait_for(asyncio.gather(*(o.finished.wait() for o in others)), 30)
            alone = [await router.generate(20 + h, [*PROMPT, h], max_tokens=40) for h in range(4)]
        assert text_of(running, chosen) in ("fox", "dog")
        assert chosen.end is not None and chosen.end.reason == common.FINISH_REASON_STOP
        assert [o.token_ids for o in others] == [o.token_ids for o in alone]

    async def test_a_slow_compile_holds_up_nobody_and_may_be_cancelled(
        self, running: RunningVerifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compile_it = GrammarCompiler.matcher

        def slowly(self: GrammarCompiler, grammar: Grammar) -> Any:
            time.sleep(1.0)
            return compile_it(self, grammar)

        monkeypatch.setattr(GrammarCompiler, "matcher", slowly)
        async with RouterPeer(running.address) as router:
            waiting = await router.submit(1, PROMPT, grammar=JSON)
            dropped = await router.submit(2, PROMPT, grammar=JSON)
            other = await router.generate(3, PROMPT)
            assert len(other.token_ids) == 24 and not waiting.token_ids
            await router.send(cancel={"handles": [2]})
            await asyncio.wait_for(waiting.finished.wait(), 30)
            assert waiting.token_ids and not dropped.token_ids
            again = await router.generate(2, PROMPT, grammar=JSON)
            assert again.token_ids == waiting.token_ids
            await router.submit(4, PROMPT, grammar=JSON)  # the stream closes meanwhile

    async def test_a_fault_of_the_client_is_no_error_of_ours(
        self, running: RunningVerifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def advance(self: GrammarMatcher, token_id: int) -> None:
            raise self._grammar.error("takes too much")

        monkeypatch.setattr(GrammarMatcher, "advance", advance)
        async with RouterPeer(running.address) as router:
            with structlog.testing.capture_logs() as logs:
                refused = await router.generate(1, PROMPT, grammar=JSON)
        assert error_of(refused) == (code_pb2.INVALID_ARGUMENT, "sampling.grammar.json_schema")
        (log,) = (log for log in logs if log.get("request_id"))
        assert log["log_level"] == "info" and "exc_info" not in log

    async def test_a_stop_string_ends_it_before_the_grammar_does(self, running: RunningVerifier) -> None:
        async with RouterPeer(running.address) as router:
            output = await router.generate(1, PROMPT, grammar=JSON, stopping={"stop_strings": ["name"]}, max_tokens=80)
        assert output.end is not None and output.end.stop_string == "name"
        assert text_of(running, output).endswith("name")
