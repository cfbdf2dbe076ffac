"""The sampler under a grammar: what it may choose, where it ends, and that trees change none of it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.tokenizer_folders import byte_level_bpe, write_folder
from support.tree_shapes import SHAPES

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar, GrammarKind
from treeserve_core.outcome import FinishReason
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.next_token import next_token
from treeserve_engine.processors import TokenContext, processed_logits
from treeserve_text.grammar import GrammarCompiler
from treeserve_text.tokenizer import Tokenizer

PROMPT = (5, 6, 7)
PADDING = 6
OBJECT = Grammar(
    GrammarKind.JSON_SCHEMA,
    (
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": ["the quick", "the dog"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        ),
    ),
)
WORDS = Grammar(GrammarKind.REGEX, (r"[a-d]{2,}",))
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3},
    {"temperature": 2.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {7: 100.0}},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_folder(write_folder(byte_level_bpe(), folder, eos_token="<|im_end|>"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


@pytest.fixture
def make(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Any:
    def sampler(
        grammar: Grammar,
        params: dict[str, Any] | None = None,
        generated: tuple[int, ...] = (),
        eos: tuple[int, ...] | None = None,
        **stopping: Any,
    ) -> SequenceSampler:
        return SequenceSampler(
            SamplingParams(**(params or {}), grammar=grammar),
            StoppingCriteria(**{"max_tokens": 200, **stopping}),
            PROMPT,
            eos_token_ids=tokenizer.eos_token_ids if eos is None else eos,
            vocab_size=tokenizer.vocab_size,
            generated_token_ids=generated,
            constraint=compiler.matcher(grammar),
        )

    return sampler


def logits_after(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A model: logits that the tokens so far decide, padding the largest of all."""
    rng = np.random.default_rng([*tokens, len(tokens)])
    logits = rng.normal(scale=3.0, size=tokenizer.vocab_size + PADDING).astype(np.float32)
    logits[tokenizer.vocab_size :] = 99.0
    return logits


def plain(tokenizer: Tokenizer, sampler: SequenceSampler, done: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Plain decoding to the end; all output."""
    output = list(done)
    while sampler.finish_reason is None:
        output.append(sampler.next_token(logits_after(tokenizer, (*PROMPT, *output))))
        sampler.append(output[-1])
    return tuple(output)


def in_trees(
    tokenizer: Tokenizer, sampler: SequenceSampler, truth: tuple[int, ...], shape: str, seed: int
) -> tuple[tuple[int, ...], int]:
    """Decoding with trees around the truth: all output, and the accepted nodes."""
    rng, output, accepted = random.Random(seed), [], 0
    while sampler.finish_reason is None:
        tree = SHAPES[shape](sampler.last_token_id, truth[len(output) :], 8, tokenizer.vocab_size, rng)
        paths = [tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))]
        rows = [logits_after(tokenizer, (*PROMPT, *output, *path)) for path in paths]
        outcome = accept(tree, rows.__getitem__, sampler)
        output += outcome.token_ids
        accepted += len(outcome.accepted_nodes)
    return tuple(output), accepted


def text_of(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


@pytest.mark.parametrize("params", PARAMS)
def test_output_is_a_text_of_the_grammar(tokenizer: Tokenizer, make: Any, params: dict[str, Any]) -> None:
    for seed in range(10):
        sampler = make(OBJECT, {**params, "seed": seed})
        output = plain(tokenizer, sampler)
        if sampler.finish_reason is FinishReason.LENGTH:
            continue
        value = json.loads(text_of(tokenizer, output))
        assert len(value["a"]) <= 5 and value["b"] in ("the quick", "the dog")
        assert output[-1] not in tokenizer.eos_token_ids, "nothing can follow a whole object: it ends without one more"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("params", PARAMS)
def test_trees_change_no_token(tokenizer: Tokenizer, make: Any, params: dict[str, Any], shape: str) -> None:
    accepted = 0
    for seed, grammar in enumerate((OBJECT, WORDS, OBJECT)):
        given = {**params, "seed": seed}
        expected = plain(tokenizer, make(grammar, given, max_tokens=60))
        output, nodes = in_trees(tokenizer, make(grammar, given, max_tokens=60), expected, shape, seed)
        assert output == expected
        accepted += nodes
    assert accepted > 0 or shape == "misleading"


@pytest.mark.parametrize("params", PARAMS[:3])
def test_a_replay_goes_on_with_the_same_tokens(tokenizer: Tokenizer, make: Any, params: dict[str, Any]) -> None:
    expected = plain(tokenizer, make(OBJECT, params, max_tokens=60))
    assert len(expected) > 8
    for cut in range(len(expected)):
        done = expected[:cut]
        assert plain(tokenizer, make(OBJECT, params, done, max_tokens=60), done) == expected


def test_it_draws_from_what_is_allowed(tokenizer: Tokenizer, make: Any, compiler: GrammarCompiler) -> None:
    """The mask comes before temperature and filters, and to the same effect as blocking all other ids."""
    others = np.flatnonzero(~compiler.matcher(WORDS).allowed()).tolist()
    for seed in range(40):
        for params in PARAMS:
            sampler = make(WORDS, {**params, "seed": seed})
            logits = logits_after(tokenizer, (seed,))
            by_blocking = next_token(
                logits[: tokenizer.vocab_size],
                SamplingParams(**params, seed=seed),
                TokenContext(PROMPT),
                len(PROMPT),
                others,
            )
            assert sampler.next_token(logits) == by_blocking


def test_without_a_grammar_logits_are_not_even_copied() -> None:
    logits = np.zeros(10, np.float32)
    assert processed_logits(logits, SamplingParams(), TokenContext()) is logits


def test_log_probs_are_those_of_what_is_allowed(tokenizer: Tokenizer, make: Any, compiler: GrammarCompiler) -> None:
    sampler = make(WORDS, {"top_log_probs": 20})
    logits = logits_after(tokenizer, PROMPT)
    token_id = sampler.next_token(logits)
    reported = sampler.log_probs(logits, token_id)
    allowed = np.flatnonzero(compiler.matcher(WORDS).allowed())
    chances = np.exp(logits[allowed].astype(np.float64))
    assert reported.log_prob == pytest.approx(np.log(chances.max() / chances.sum()))
    assert {i for i, _ in reported.top} <= set(allowed.tolist())


class TestEnd:
    @pytest.fixture
    def a(self, tokenizer: Tokenizer) -> int:
        return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"a")

    def favour(self, tokenizer: Tokenizer, *ids: int) -> npt.NDArray[np.float32]:
        logits = np.zeros(tokenizer.vocab_size + PADDING, np.float32)
        for rank, token_id in enumerate(ids):
            logits[token_id] = 50.0 - rank
        return logits

    def test_it_may_end_where_the_grammar_may(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        (eos,) = tokenizer.eos_token_ids
        sampler = make(WORDS)
        for _ in range(2):
            assert sampler.next_token(self.favour(tokenizer, eos, a)) == a, "not yet"
            assert sampler.append(a) is None
        assert sampler.next_token(self.favour(tokenizer, eos, a)) == eos
        assert sampler.append(eos) is FinishReason.STOP

    def test_nothing_follows_an_end_inside_a_tree(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        (eos,) = tokenizer.eos_token_ids
        tree = TokenTree.chain([PROMPT[-1], a, a, eos, a, a])
        rows = [self.favour(tokenizer, want) for want in (a, a, eos, a, a, a)]
        outcome = accept(tree, rows.__getitem__, make(WORDS))
        assert (outcome.token_ids, outcome.finish_reason) == ((a, a, eos), FinishReason.STOP)

    def test_a_complete_grammar_ends_inside_a_tree(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        tree = TokenTree.chain([PROMPT[-1], a, a, a, a])
        grammar = Grammar(GrammarKind.REGEX, ("aaa",))
        outcome = accept(tree, lambda node: self.favour(tokenizer, a), make(grammar))
        assert (outcome.token_ids, outcome.finish_reason) == ((a, a, a), FinishReason.STOP)

    @pytest.mark.parametrize("stopping", [{"ignore_eos": True}, {"min_tokens": 20}, {}])
    @pytest.mark.parametrize("eos", [(), None])
    def test_a_complete_grammar_ends_whatever_else_was_asked(
        self, tokenizer: Tokenizer, make: Any, a: int, stopping: dict[str, Any], eos: tuple[int, ...] | None
    ) -> None:
        sampler = make(Grammar(GrammarKind.REGEX, ("aaa",)), eos=eos, **stopping)
        output = plain(tokenizer, sampler)
        assert text_of(tokenizer, output) == "aaa"
        assert sampler.finish_reason is FinishReason.STOP

    def test_min_tokens_keeps_it_going_while_it_can(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        (eos,) = tokenizer.eos_token_ids
        sampler = make(WORDS, min_tokens=5)
        for _ in range(5):
            assert sampler.next_token(self.favour(tokenizer, eos, a)) == a
            sampler.append(a)
        assert sampler.next_token(self.favour(tokenizer, eos, a)) == eos

    def test_an_ignored_end_is_not_allowed(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        (eos,) = tokenizer.eos_token_ids
        sampler = make(WORDS, ignore_eos=True, max_tokens=6)
        for _ in range(5):
            assert sampler.next_token(self.favour(tokenizer, eos, a)) == a
            assert sampler.append(a) is None
        assert sampler.append(a) is FinishReason.LENGTH

    def test_a_stop_token_ends_it_where_the_grammar_has_it(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        sampler = make(WORDS, stop_token_ids=(a,))
        assert sampler.next_token(self.favour(tokenizer, a)) == a
        assert sampler.append(a) is FinishReason.STOP

    def test_blocked_stop_tokens_give_way_where_nothing_else_is_left(
        self, tokenizer: Tokenizer, make: Any, a: int
    ) -> None:
        sampler = make(Grammar(GrammarKind.REGEX, ("ab",)), stop_token_ids=(a,), min_tokens=5)
        assert sampler.next_token(self.favour(tokenizer, a)) == a

    def test_length_may_cut_it_short(self, tokenizer: Tokenizer, make: Any) -> None:
        sampler = make(OBJECT, max_tokens=3)
        assert len(plain(tokenizer, sampler)) == 3
        assert sampler.finish_reason is FinishReason.LENGTH

    def test_a_dead_end_is_an_error(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        sampler = make(WORDS)

        class Nothing:
            may_end = is_complete = False

            def allowed(self) -> npt.NDArray[np.bool_]:
                return np.zeros(tokenizer.vocab_size, np.bool_)

        sampler._constraint = Nothing()
        with pytest.raises(InvalidArgumentError, match=r"sampling\.grammar: allows no token"):
            sampler.next_token(self.favour(tokenizer, a))

    def test_replayed_tokens_must_be_the_grammars(self, tokenizer: Tokenizer, make: Any, a: int) -> None:
        with pytest.raises(InvalidArgumentError, match="does not allow token"):
            make(Grammar(GrammarKind.REGEX, ("b+",)), generated=(a,))


def test_multi_step_acceptance_keeps_to_the_grammar(tokenizer: Tokenizer, make: Any) -> None:
    acceptance = Acceptance(AcceptanceRule.MULTI_STEP)
    for seed in range(20):
        sampler, rng, output = make(OBJECT, {"temperature": 1.0, "seed": seed}, max_tokens=100), random.Random(seed), []
        while sampler.finish_reason is None:
            tree = SHAPES["scatter"](sampler.last_token_id, (), 8, tokenizer.vocab_size, rng)
            paths = [tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))]
            rows = [logits_after(tokenizer, (*PROMPT, *output, *path)) for path in paths]
            output += accept(tree, rows.__getitem__, sampler, acceptance=acceptance).token_ids
        if sampler.finish_reason is FinishReason.STOP:
            assert set(json.loads(text_of(tokenizer, tuple(output)))) == {"a", "b"}
