"""What a generation's text must be: any JSON object, one of a schema, or what a pattern, a grammar or a list allows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

from treeserve_core.errors import InvalidArgumentError

MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 1024
MAX_RULES = 500
# An automaton that counts multiples has as many states as there are remainders.
MAX_MULTIPLE = 10_000
_MOST_DIGITS = 30


class GrammarKind(StrEnum):
    """How a grammar is written; each is the name of its field in the public API."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True)
class Grammar:
    """The texts that a generation may have. It covers the output alone, the prompt is free.

    Attributes:
        kind: how it is written.
        texts: the choices of CHOICE; none for JSON_OBJECT; the one text of any other kind.

    Raises:
        InvalidArgumentError: if it is too large, a schema is no JSON object or sets how it is read, or it counts
            multiples that are too large. Whether a pattern or a grammar means anything is for its compiler to say.
    """

    kind: GrammarKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_bytes > MAX_GRAMMAR_BYTES:
            raise self.error(f"is longer than {MAX_GRAMMAR_BYTES} bytes")
        if self.kind is GrammarKind.CHOICE:
            if not 1 <= len(self.texts) <= MAX_CHOICES or not all(self.texts):
                raise self.error(f"must be 1 to {MAX_CHOICES} texts, none of them empty")
        elif len(self.texts) != (self.kind is not GrammarKind.JSON_OBJECT):
            raise self.error("is one text")
        elif self.kind is GrammarKind.JSON_SCHEMA:
            self._check_schema()
        elif self.kind is GrammarKind.LARK and _most_rules(self.texts[0]) > MAX_RULES:
            raise self.error(f"has more than {MAX_RULES} rules, which lines with a colon count as")

    @property
    def num_bytes(self) -> int:
        """Size of its texts."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def field(self) -> str:
        """Its name in the public API."""
        return f"sampling.grammar.{self.kind}"

    def error(self, reason: str) -> InvalidArgumentError:
        """What to raise if it cannot be used."""
        return InvalidArgumentError(self.field, reason)

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.texts[0], parse_float=Decimal, parse_constant=_no_number)
        except (ValueError, ArithmeticError, RecursionError):
            raise self.error("is not JSON, or nested too deeply") from None
        if not isinstance(schema, dict):
            raise self.error("must be a JSON object")
        if "x-guidance" in schema:
            raise self.error("must not have x-guidance: what it sets is not the client's to say")
        multiples = [v for v in _values_of("multipleOf", schema) if isinstance(v, int | Decimal) and v > 0]
        if any(_remainders(multiple) > MAX_MULTIPLE for multiple in multiples):
            raise self.error(f"has a multipleOf with more than {MAX_MULTIPLE} remainders")
        if math.lcm(*map(_remainders, multiples)) > MAX_MULTIPLE:
            raise self.error(f"has values of multipleOf whose common multiple is above {MAX_MULTIPLE}")


def _most_rules(lark: str) -> int:
    """At least as many as it has: a rule has a colon, and ends with its line."""
    return sum(":" in line for line in lark.split("\n"))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _values_of(key: str, value: Any) -> Iterator[Any]:
    """All values of a key, however deep."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict):
            if key in inner:
                yield inner[key]
            pending += inner.values()
        elif isinstance(inner, list):
            pending += inner


def _remainders(multiple: int | Decimal) -> int:
    """States that tell its multiples from other numbers: those of 0.25 take as many as those of 25."""
    number = Decimal(multiple)
    if abs(number.adjusted()) > _MOST_DIGITS:
        return MAX_MULTIPLE + 1
    _, digits, exponent = number.normalize().as_tuple()
    significant = int("".join(map(str, digits)))
    return significant * int("1" + "0" * max(0, int(exponent)))
