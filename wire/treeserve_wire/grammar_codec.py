"""Grammars to protobuf messages and back."""

from __future__ import annotations

from treeserve.common.v1 import common_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar, GrammarKind


def grammar_to_proto(grammar: Grammar) -> common_pb2.Grammar:
    """Encode a grammar."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return common_pb2.Grammar(json_object=True)
        case GrammarKind.JSON_SCHEMA:
            return common_pb2.Grammar(json_schema=grammar.texts[0])
        case GrammarKind.REGEX:
            return common_pb2.Grammar(regex=grammar.texts[0])
        case GrammarKind.LARK:
            return common_pb2.Grammar(lark=grammar.texts[0])
        case GrammarKind.CHOICE:
            return common_pb2.Grammar(choice=common_pb2.Choice(texts=grammar.texts))


def grammar_from_proto(msg: common_pb2.Grammar) -> Grammar:
    """Decode a grammar.

    Raises:
        InvalidArgumentError: if it is outside its limits, or none of the kinds that this side knows.
    """
    match msg.WhichOneof("kind"):
        case "json_object":
            if not msg.json_object:
                raise InvalidArgumentError("sampling.grammar.json_object", "must be true")
            return Grammar(GrammarKind.JSON_OBJECT)
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, (msg.json_schema,))
        case "regex":
            return Grammar(GrammarKind.REGEX, (msg.regex,))
        case "lark":
            return Grammar(GrammarKind.LARK, (msg.lark,))
        case "choice":
            return Grammar(GrammarKind.CHOICE, tuple(msg.choice.texts))
        case _:
            raise InvalidArgumentError("sampling.grammar", "is of no known kind")
