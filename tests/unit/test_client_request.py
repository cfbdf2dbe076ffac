"""What the SDK refuses before it calls: with the name of the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from treeserve_client import InvalidArgument
from treeserve_client.request import build_request


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 99_999_999_999}, "max_tokens"),
        ({"max_nodes": -1}, "max_nodes"),
        ({"prompt": None, "token_ids": [1, -1]}, "token_ids"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1].content"),
        ({"prompt": None, "messages": [{"content": "a"}]}, "messages[0].role"),
        ({"prompt": None, "messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ],
)
def test_a_wrong_value_is_named(params: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build_request({"prompt": "x", **params})  # type: ignore[typeddict-item]
    assert list(refused.value.fields) == [name]
    assert str(refused.value).startswith(f"{name}: ")


def test_messages_are_no_text() -> None:
    with pytest.raises(TypeError, match="a role and a content"):
        build_request({"messages": "hi"})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("name", ["role", "content"])
def test_a_none_in_a_message_is_told_from_what_is_missing(name: str) -> None:
    message: dict[str, Any] = {"role": "user", "content": "a"}
    with pytest.raises(InvalidArgument, match=rf"^messages\[0\]\.{name}: must not be None$"):
        build_request({"messages": [{**message, name: None}]})
    del message[name]
    with pytest.raises(InvalidArgument, match=rf"^messages\[0\]\.{name}: is missing$"):
        build_request({"messages": [message]})
