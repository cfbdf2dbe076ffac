"""Which tokens a grammar allows next: the one place that knows llguidance.

Masks are a pure function of the grammar, the vocabulary and the output so far: a sequence that is replayed elsewhere,
or decoded along a tree, meets the same ones. What the library may spend on a mask is bounded. The end is a token of its
own beyond the vocabulary: which of the model's tokens end a generation is for the sampler to know.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar, GrammarKind
from treeserve_text.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
_SILENT = 0
_MAX_REASON_CHARS = 300
_NOT_ALLOWED = "doesn't satisfy the grammar"
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |<non-verbose/>")
_SOURCE_LINE = re.compile(r"\s*(\d+ \||\^+$)|\s*$")
# A prototype holds what its masks have cost so far, up to some ten megabytes.
_MOST_COMPILED = 32
_MOST_FORCED_CHARS = 512
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# What brings patterns into a schema.
_PATTERN_KEYS = ("pattern", "patternProperties")
# A string, a regular expression, a comment, or a token of the vocabulary by its name or number.
_LARK_LEXEME = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\]|\\.)+/|(?:#|//)[^\n]*|(?P<token><[^<>\s]+>)')


def check_grammar(grammar: Grammar) -> None:
    """Compile a grammar without a vocabulary: what is wrong with it is nearly always found. Takes up to 0.1 s.

    Raises:
        InvalidArgumentError: naming its field, with the reason.
    """
    reason = LLMatcher.validate_grammar(_source(grammar), limits=_LIMITS)
    if reason:
        raise _refusal(grammar, reason)


class GrammarMatcher:
    """What a grammar allows after the tokens so far. Belongs to one sequence."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocab_size: int, never: npt.NDArray[np.intp]) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._never = never  # tokens that are no text
        self._mask: BoolArray | None = None  # of the present place

    def copy(self) -> GrammarMatcher:
        """Another one at the same place."""
        return GrammarMatcher(self._grammar, self._matcher.deep_copy(), self._vocab_size, self._never)

    def allowed(self) -> BoolArray:
        """Which tokens may come next, special ones and those that end a generation not among them: bool[vocab_size].

        Read-only.

        Raises:
            InvalidArgumentError: if the grammar takes more than its share to follow.
        """
        return self._present_mask()[: self._vocab_size]

    @property
    def may_end(self) -> bool:
        """Whether the output so far is one of the grammar's texts."""
        return bool(self._present_mask()[self._vocab_size])

    @property
    def is_complete(self) -> bool:
        """Whether it is, and nothing can follow."""
        if self._matcher.is_stopped():
            return self._matcher.is_accepting()
        return self._matcher.is_accepting() and not self.allowed().any()

    def advance(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            InvalidArgumentError: if it is not allowed, or the grammar takes more than its share to follow.
        """
        self._mask = None
        if self._matcher.is_stopped() or not self._matcher.consume_token(token_id):
            reason = self._matcher.get_error() or _NOT_ALLOWED
            if _NOT_ALLOWED in reason:
                raise self._grammar.error(f"does not allow token {token_id} here")
            raise _refusal(self._grammar, reason)

    def forced(self) -> Sequence[int]:
        """The tokens that come next whatever the model says."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def _present_mask(self) -> BoolArray:
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                raise _refusal(self._grammar, self._matcher.get_error())
            self._mask = np.unpackbits(bits, count=self._vocab_size + 1, bitorder="little").view(np.bool_)
            self._mask[self._never] = False
        return self._mask


class GrammarCompiler:
    """Makes matchers for one tokenizer, and keeps the grammars used last. For one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[Grammar, GrammarMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of the output. Takes up to some 0.2 s for a grammar that is new here.

        Raises:
            InvalidArgumentError: naming the grammar's field, if it has no meaning or allows no text.
        """
        prototype = self._compiled.get(grammar)
        if prototype is None:
            prototype = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return prototype.copy()

    def prepare(self) -> None:
        """Read the vocabulary, which the first grammar would wait for: no thread runs meanwhile."""
        _ = self._vocabulary

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        matcher = LLMatcher(self._vocabulary, _source(grammar), log_level=_SILENT, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        prototype = GrammarMatcher(grammar, matcher, self._tokenizer.vocab_size, self._no_text)
        if not prototype.allowed().any():
            raise grammar.error("allows no text but the empty one" if prototype.may_end else "allows no text")
        return prototype

    @cached_property
    def _no_text(self) -> npt.NDArray[np.intp]:
        return np.array(sorted({*self._tokenizer.special_ids, *self._tokenizer.eos_token_ids}), np.intp)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._tokenizer)
        made = LLTokenizer(TokenizerWrapper(vocabulary))
        vocabulary.greedy = made.greedy_tokenize
        return made


class _Vocabulary:
    """A tokenizer as llguidance takes it, and the end as one more token.

    Attributes:
        greedy: makes tokens that spell a text exactly; set once the library has read the tokens.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.greedy: Callable[[str], list[int]] = lambda text: []
        self.eos_token_id = tokenizer.vocab_size
        # Ends of a generation are no text, even where the tokenizer reads them as some. Special tokens spell nothing.
        self.special_token_ids = [*tokenizer.eos_token_ids, self.eos_token_id]
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.tokens.append(b"end")

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of text that is forced. A tokenizer that begins with a space or normalises spells another."""
        token_ids = self._tokenizer.encode_inner(text.decode())
        if b"".join(map(self._tokenizer.token_bytes, token_ids)) == text:
            return token_ids
        return self.greedy(text.decode())


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Raises:
        InvalidArgumentError: if it embeds others, whose limits nobody checked, or names tokens.
    """
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _lark('start: %json {"type": "object"}')
        case GrammarKind.JSON_SCHEMA:
            schema = grammar.texts[0]
            has_patterns = any(f'"{key}"' in schema for key in _PATTERN_KEYS) or "\\u" in schema
            strings = _JSON_STRING.findall(schema)
            return _lark(f"start: %json {schema}", forcing=not has_patterns and _are_short(strings))
        case GrammarKind.REGEX:
            source = json.loads(LLMatcher.grammar_from_regex(grammar.texts[0]))
            return _lark(source["grammars"][0]["lark_grammar"], forcing=False)
        case GrammarKind.LARK:
            if any(directive in grammar.texts[0] for directive in ("%json", "%lark", "%llguidance")):
                raise grammar.error("must not embed other grammars (%json, %lark, %llguidance)")
            if any(lexeme["token"] for lexeme in _LARK_LEXEME.finditer(grammar.texts[0])):
                raise grammar.error("must not name tokens (<[1]>, <|name|>): it is one of texts")
            return _lark(grammar.texts[0], forcing=False)
        case GrammarKind.CHOICE:
            choices = [json.dumps(text, ensure_ascii=False) for text in grammar.texts]
            return _lark("start: " + " | ".join(choices), forcing=_are_short(choices))


def _lark(text: str, *, forcing: bool = True) -> str:
    """A Lark grammar.

    Args:
        forcing: where only one text can follow, only the tokens that the tokenizer makes of it may. All of them are
            looked ahead at, which takes too long where the text is long or a pattern's repeats make it so.
    """
    return LLMatcher.grammar_from_lark(text if forcing else '%llguidance {"no_forcing": true}\n' + text)


def _are_short(texts: Sequence[str]) -> bool:
    return max(map(len, texts), default=0) <= _MOST_FORCED_CHARS


def _refusal(grammar: Grammar, reason: str) -> InvalidArgumentError:
    if "NoExtension" in reason:
        return grammar.error("allows no token of the vocabulary after the output so far")
    # Where in its source: that is not the client's. Then the source itself, with line numbers and a mark.
    reason = _PLACE.sub("", reason)
    lines = [line.strip() for line in reason.splitlines() if not _SOURCE_LINE.match(line)]
    return grammar.error(" ".join(lines)[:_MAX_REASON_CHARS])
