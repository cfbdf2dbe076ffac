"""The OpenAI-compatible ways to say what an answer must be, and vLLM's: the grammars they stand for."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar, GrammarKind
from treeserve_router.openai_strict import Strict


class JsonSchemaFormat(Strict):
    """A named schema. Schemas are always kept to, so `strict` changes nothing."""

    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str = ""
    strict: bool = True


class ResponseFormat(Strict):
    """OpenAI's own: plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    def to_grammar(self) -> Grammar | None:
        """The grammar it stands for; None for plain text. Raises InvalidArgumentError for a schema without its type."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidArgumentError(
                "response_format.json_schema", "goes with the type json_schema, and it with that"
            )
        if self.json_schema is not None:
            return _schema(self.param, self.json_schema.json_schema)
        return Grammar(GrammarKind.JSON_OBJECT) if self.type == "json_object" else None

    @property
    def param(self) -> str:
        """The parameter that says it."""
        return "response_format" if self.json_schema is None else "response_format.json_schema.schema"


class StructuredOutputs(Strict):
    """vLLM's extension: one of its fields."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def to_grammar(self) -> Grammar:
        """The grammar it stands for. Raises InvalidArgumentError if that is not exactly one."""
        if len(self._given) != 1:
            raise InvalidArgumentError("structured_outputs", "exactly one of json, json_object, regex, choice, grammar")
        if self.json_ is not None:
            return _schema(self.param, self.json_)
        if self.regex is not None:
            return _grammar(self.param, GrammarKind.REGEX, (self.regex,))
        if self.choice is not None:
            return _grammar(self.param, GrammarKind.CHOICE, tuple(self.choice))
        if self.grammar is not None:
            return _grammar(self.param, GrammarKind.LARK, (self.grammar,))
        return Grammar(GrammarKind.JSON_OBJECT)

    @property
    def param(self) -> str:
        """The parameter that says it."""
        return f"structured_outputs.{self._given[0]}"

    @property
    def _given(self) -> list[str]:
        fields = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return [name for name, value in fields.items() if value is not None and value is not False]


def _schema(param: str, schema: dict[str, Any] | str) -> Grammar:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidArgumentError(param, "is nested too deeply") from None
    return _grammar(param, GrammarKind.JSON_SCHEMA, (text,))


def _grammar(param: str, kind: GrammarKind, texts: tuple[str, ...]) -> Grammar:
    try:
        return Grammar(kind, texts)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(param, error.reason) from None
