"""Grammars: what is refused, which tokens a matcher allows, and that where it is depends on the tokens alone."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.tokenizer_folders import ADDED, byte_level_bpe, sentencepiece_bpe, write_folder

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError, OverloadedError
from treeserve_core.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_RULES, Grammar, GrammarKind
from treeserve_core.sampling import SamplingParams, SequenceLimits, check_combination
from treeserve_text import grammar as grammar_module
from treeserve_text.grammar import GrammarCompiler, GrammarMatcher, check_grammar
from treeserve_text.grammar_thread import MAX_PENDING, GrammarThread
from treeserve_text.tokenizer import Tokenizer

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)
REGEX, LARK, CHOICE = GrammarKind.REGEX, GrammarKind.LARK, GrammarKind.CHOICE
GRAMMARS = {
    "json_object": Grammar(GrammarKind.JSON_OBJECT),
    "json_schema": Grammar(GrammarKind.JSON_SCHEMA, (SCHEMA,)),
    "regex": Grammar(REGEX, (r"(\d{3}-){2}[a-f]+/x",)),
    "lark": Grammar(LARK, ('start: item ("," item)*\nitem: "one" | "two" | "(" start ")"',)),
    "choice": Grammar(CHOICE, ("the quick fox", 'naïve 🙂 "quoted"\n', "the")),
}


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte-level":
        return Tokenizer.from_folder(write_folder(byte_level_bpe(), folder, eos_token="<|im_end|>"))
    return Tokenizer.from_folder(write_folder(sentencepiece_bpe(), folder, eos_token="</s>"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def chain(rules: int) -> str:
    return "start: a1\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(1, rules)) + f'\na{rules}: "x"'


def deep_schema() -> str:
    """6000 arrays in each other, as many as 64 KiB hold."""
    levels = [f'"{i}":' + '{"items":' * 40 + f'{{"$ref":"#/$defs/{i + 1}"}}' + "}" * 40 for i in range(150)]
    return '{"$ref":"#/$defs/0","$defs":{' + ",".join(levels) + ',"150":{"type":"string"}}}'


def walk(matcher: GrammarMatcher, rng: random.Random, most: int = 200) -> list[int]:
    """Random allowed tokens up to a place where the output may end."""
    tokens: list[int] = []
    while not matcher.is_complete and len(tokens) < most:
        allowed = np.flatnonzero(matcher.allowed())
        if len(allowed) == 0 or (matcher.may_end and rng.random() < 0.3):
            break
        tokens.append(int(rng.choice(allowed.tolist())))
        matcher.advance(tokens[-1])
    return tokens


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


@pytest.mark.parametrize("name", ["json_schema", "lark", "choice"])
def test_what_a_matcher_allows_is_a_text_of_the_grammar(
    tokenizer: Tokenizer, compiler: GrammarCompiler, name: str
) -> None:
    ended = 0
    for seed in range(30):
        matcher = compiler.matcher(GRAMMARS[name])
        text = text_of(tokenizer, walk(matcher, random.Random(seed)))
        if not matcher.may_end:
            continue
        ended += 1
        if name == "json_schema":
            value = json.loads(text)
            assert set(value) == {"name", "ok"} and len(value["name"]) <= 6
        elif name == "choice":
            assert text in GRAMMARS[name].texts
        else:
            assert text.replace("(", "").replace(")", "").replace("one", "").replace("two", "").strip(",") == ""
    assert ended > 5


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_replayed_matcher_allows_the_same(compiler: GrammarCompiler, name: str) -> None:
    for seed in range(10):
        asked = compiler.matcher(GRAMMARS[name])
        tokens = walk(asked, random.Random(seed))
        masks = []
        replayed = compiler.matcher(GRAMMARS[name])
        for place, token_id in enumerate(tokens):
            again = compiler.matcher(GRAMMARS[name])
            for earlier in tokens[:place]:
                again.advance(earlier)  # nobody asked it for anything on the way
            masks.append(again.allowed())
            assert (replayed.allowed() == masks[-1]).all() and masks[-1][token_id]
            assert replayed.may_end == again.may_end
            replayed.advance(token_id)
        assert (replayed.may_end, replayed.is_complete) == (asked.may_end, asked.is_complete)


def test_specials_and_ends_are_never_text(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar(REGEX, (r"(?s:.)+",)))
    allowed = matcher.allowed()
    assert allowed.shape == (tokenizer.vocab_size,) and allowed.sum() > 50
    assert not allowed[[*tokenizer.special_ids, *tokenizer.eos_token_ids]].any()
    assert not matcher.may_end and not matcher.is_complete


@pytest.mark.parametrize("text", ['start: "<[1]>"', "start: /<[a-z]+>/", 'start: "a" // <[1]>', 'start: "<" "b" ">"'])
def test_text_that_looks_like_a_token_is_text(compiler: GrammarCompiler, text: str) -> None:
    assert compiler.matcher(Grammar(LARK, (text,))).allowed().any()


def test_no_grammar_makes_a_special_token_text(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_LARK_LEXEME", re.compile("(?P<token>(?!))"))  # none is found
    no_text = {*tokenizer.special_ids, *tokenizer.eos_token_ids}
    allowed = compiler.matcher(Grammar(LARK, ("start: <[*]>",))).allowed()
    assert allowed.any() and not allowed[sorted(no_text)].any()


def test_an_end_that_reads_as_text_is_none(tmp_path: Path) -> None:
    loaded = Tokenizer.from_folder(write_folder(byte_level_bpe(), tmp_path, eos_token=ADDED))
    (eos,) = loaded.eos_token_ids
    assert loaded.token_bytes(eos) == ADDED.encode()
    matcher = GrammarCompiler(loaded).matcher(Grammar(REGEX, (r"(?s:.)+",)))
    assert matcher.allowed().any() and not matcher.allowed()[eos]
    with pytest.raises(InvalidArgumentError):
        matcher.advance(eos)


def test_complete_is_where_nothing_can_follow(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar(CHOICE, ("a", "ab")))
    a, b = (next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == text) for text in (b"a", b"b"))
    matcher.advance(a)
    assert matcher.may_end and not matcher.is_complete, "b may follow"
    matcher.advance(b)
    assert matcher.may_end and matcher.is_complete
    assert not matcher.allowed().any()
    with pytest.raises(InvalidArgumentError, match=r"sampling\.grammar\.choice"):
        matcher.advance(a)


def test_a_token_that_is_not_allowed_is_refused(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(GRAMMARS["regex"])
    with pytest.raises(InvalidArgumentError, match=r"sampling\.grammar\.regex: does not allow token"):
        matcher.advance(tokenizer.encode_inner("x")[-1])


def test_what_takes_too_much_is_not_called_a_wrong_token(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar(REGEX, ("(a|b)*a(a|b){22}",)))
    a, b = (next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == text) for text in (b"a", b"b"))
    rng = random.Random(1)
    with pytest.raises(InvalidArgumentError, match=r"sampling\.grammar\.regex: .*too many") as caught:
        for _ in range(50_000):
            matcher.advance(rng.choice((a, b)))
    assert "does not allow" not in caught.value.reason


def test_matchers_share_a_compiled_grammar_and_nothing_else(compiler: GrammarCompiler) -> None:
    one, other = compiler.matcher(GRAMMARS["lark"]), compiler.matcher(GRAMMARS["lark"])
    before = other.allowed().copy()
    walk(one, random.Random(1), most=3)
    assert (other.allowed() == before).all()


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (REGEX, ("(a",)),
        (REGEX, (r"(a)\1",)),
        (REGEX, ("(?=a)b",)),
        (REGEX, ("",)),
        (LARK, ("start: nothing",)),
        (LARK, ("",)),
        (LARK, ('start: ""',)),
        (LARK, ("start: start",)),
        (LARK, ("start: " + "(" * 5000 + '"a"' + ")" * 5000,)),
        (LARK, ('start: %json {"multipleOf": 9999991}',)),
        (LARK, ("start: <[1]>",)),
        (LARK, ('start: "a" <[^1-9]> "b"',)),
        (LARK, ("start: a // <\na: /x/ <|im_end|>",)),
        (GrammarKind.JSON_SCHEMA, ('{"type": "nothing"}',)),
        (GrammarKind.JSON_SCHEMA, ('{"type": "object", "properties": {"a": false}, "required": ["a"]}',)),
        (GrammarKind.JSON_SCHEMA, ('{"$ref": "#"}',)),
        (GrammarKind.JSON_SCHEMA, ('{"$ref": "http://127.0.0.1:1/x"}',)),
        (GrammarKind.JSON_SCHEMA, ('{"not": {"type": "string"}}',)),
    ],
)
def test_what_means_nothing_is_refused_by_name(
    compiler: GrammarCompiler, kind: GrammarKind, texts: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        compiler.matcher(Grammar(kind, texts))
    assert caught.value.field == f"sampling.grammar.{kind}"
    assert 0 < len(caught.value.reason) <= 300 and "%llguidance" not in caught.value.reason.replace("(%json", "")[:40]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (REGEX, ("(a",)),
        (LARK, ("start: nothing",)),
        (GrammarKind.JSON_SCHEMA, ('{"type": "nothing"}',)),
    ],
)
def test_most_is_refused_without_a_vocabulary(kind: GrammarKind, texts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_grammar(Grammar(kind, texts))
    assert caught.value.field == f"sampling.grammar.{kind}"
    for grammar in GRAMMARS.values():
        check_grammar(grammar)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (REGEX, ("a" * (MAX_GRAMMAR_BYTES + 1),)),
        (REGEX, ()),
        (GrammarKind.JSON_OBJECT, ("{}",)),
        (CHOICE, ()),
        (CHOICE, ("a", "")),
        (CHOICE, ("a",) * (MAX_CHOICES + 1)),
        (CHOICE, ("a" * MAX_GRAMMAR_BYTES, "b")),
        (GrammarKind.JSON_SCHEMA, ("",)),
        (GrammarKind.JSON_SCHEMA, ("true",)),
        (GrammarKind.JSON_SCHEMA, ('{"a": NaN}',)),
        (GrammarKind.JSON_SCHEMA, ('{"a":' * 9000 + "1" + "}" * 9000,)),
        (GrammarKind.JSON_SCHEMA, ('{"items": [{"multipleOf": 9999991}]}',)),
        (GrammarKind.JSON_SCHEMA, ('{"multipleOf": 0.9999991}',)),
        (GrammarKind.JSON_SCHEMA, ('{"multipleOf": 1e99}',)),
        (GrammarKind.JSON_SCHEMA, ('{"multipleOf": 1e999999999}',)),
        (GrammarKind.JSON_SCHEMA, ('{"minimum": 1e9999999999999999999999}',)),
        (GrammarKind.JSON_SCHEMA, ('{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}',)),
        (GrammarKind.JSON_SCHEMA, ('{"x-guidance": {"lenient": true}, "not": {"type": "string"}}',)),
        (GrammarKind.JSON_SCHEMA, ('{"\\u0078-guidance": {"lenient": true}}',)),
        (LARK, (chain(4000),)),
        (LARK, (chain(MAX_RULES).replace("a1:", " ?a1 :").replace("\n", "\r\n\t"),)),
    ],
)
def test_what_is_too_large_is_not_even_compiled(kind: GrammarKind, texts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"sampling\.grammar\.{kind}: "):
        Grammar(kind, texts)


def test_the_longest_chain_of_rules_fits_a_usual_stack() -> None:
    compiled = "from treeserve_core.grammar import *; from treeserve_text.grammar import *; import sys; "
    compiled += "check_grammar(Grammar(GrammarKind.LARK, (sys.argv[1],)))"
    process = subprocess.run([sys.executable, "-c", compiled, chain(MAX_RULES - 1)], capture_output=True, timeout=60)
    assert process.returncode == 0, process.stderr


def test_the_deepest_schema_fits_the_threads_stack() -> None:
    compiled = "from treeserve_core.grammar import *; from treeserve_text.grammar import *; import asyncio, sys; "
    compiled += "from treeserve_text.grammar_thread import GrammarThread; thread = GrammarThread(); "
    compiled += "asyncio.run(thread.run(lambda: check_grammar(Grammar(GrammarKind.JSON_SCHEMA, (sys.argv[1],)))))"
    process = subprocess.run([sys.executable, "-c", compiled, deep_schema()], capture_output=True, timeout=60)
    assert process.returncode == 0, process.stderr


async def test_few_wait_to_be_compiled() -> None:
    thread, go_on = GrammarThread(), threading.Event()
    waiting = [asyncio.create_task(thread.run(go_on.wait)) for _ in range(MAX_PENDING)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="64 grammars wait"):
        await thread.run(int)
    go_on.set()
    assert all(await asyncio.gather(*waiting)) and await thread.run(int) == 0
    thread.close()


def test_ordinary_multiples_pass() -> None:
    Grammar(
        GrammarKind.JSON_SCHEMA, ('{"a": {"multipleOf": 0.01}, "b": {"multipleOf": 1000}, "c": {"multipleOf": 0}}',)
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (REGEX, "a{1000000}"),
        (REGEX, "((a{1000}){1000}){1000}"),
        (REGEX, "(.*a){20}"),
        (REGEX, "(a|b)*a(a|b){22}"),
        (REGEX, "(a|a)*" * 500),
        (REGEX, "|".join(f"w{i}.*x" for i in range(5000))),
        (LARK, 'start: start start | "a"'),
        (LARK, "start: " + " | ".join(f"r{i}" for i in range(500)) + "".join(f'\nr{i}: "x{i}"' for i in range(500))),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 9973})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "^x{1000000}$"})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"e{i}" for i in range(4000)]})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "integer"}})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 10**6, "maxLength": 10**9})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"const": "the quick brown fox " * 3000})),
        (CHOICE, "the quick brown fox " * 3000),
        (
            GrammarKind.JSON_SCHEMA,
            '{"$defs":{"n":{"type":"object","properties":{"c":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}',
        ),
    ],
)
def test_hostile_grammars_are_bounded(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    """They mean something, or are refused; none takes what a verifier would notice: 0.02 s, where it was measured."""
    start = time.thread_time()
    try:
        walk(compiler.matcher(Grammar(kind, (text,))), random.Random(1), most=20)
    except InvalidArgumentError as error:
        assert error.field == f"sampling.grammar.{kind}"
    assert time.thread_time() - start < 0.25


def test_few_compiled_grammars_are_kept(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    for i in range(100):
        compiler.matcher(Grammar(REGEX, (f"a{i}",)))
    assert len(compiler._compiled) == 32
    assert compiler.matcher(Grammar(REGEX, ("a99",))).allowed().any()


def test_typical_acceptance_takes_no_grammar() -> None:
    params = SamplingParams(temperature=1.0, grammar=GRAMMARS["regex"])
    check_combination(params, SequenceLimits(acceptance=Acceptance(AcceptanceRule.MULTI_STEP)))
    with pytest.raises(InvalidArgumentError, match=r"sampling\.grammar: cannot be combined with typical"):
        check_combination(params, SequenceLimits(acceptance=Acceptance(AcceptanceRule.TYPICAL)))


def test_forced_tokens_spell_what_must_follow(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar(CHOICE, ("the quick fox",)))
    spelled = b""
    while not matcher.is_complete:
        forced = matcher.forced()
        token_id = forced[0] if forced else int(np.flatnonzero(matcher.allowed())[0])
        assert not forced or np.flatnonzero(matcher.allowed()).tolist() == [forced[0]]
        spelled += tokenizer.token_bytes(token_id)
        matcher.advance(token_id)
    assert spelled == b"the quick fox"
