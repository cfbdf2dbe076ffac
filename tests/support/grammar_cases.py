"""A grammar of each kind, and a schema whose texts are short."""

from __future__ import annotations

import json

from treeserve.common.v1 import common_pb2 as common

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["the quick fox", "the lazy dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
JSON = common.Grammar(json_schema=json.dumps(SCHEMA))
KINDS = {
    "json_schema": common.Grammar(json_schema=json.dumps(SCHEMA)),
    "json_object": common.Grammar(json_object=True),
    "regex": common.Grammar(regex="[a-z]+"),
    "lark": common.Grammar(lark='start: "a"+'),
    "choice": common.Grammar(choice=common.Choice(texts=["a", "b"])),
}
