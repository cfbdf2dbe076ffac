"""Ids of OpenAI-compatible answers: that of the request, after what says which endpoint answered."""

from __future__ import annotations

COMPLETION = "cmpl-"
CHAT = "chatcmpl-"


def request_id_of(answer_id: str) -> str:
    """The request's id in an answer's; any other id as it is."""
    prefix = next((prefix for prefix in (COMPLETION, CHAT) if answer_id.startswith(prefix)), "")
    return answer_id.removeprefix(prefix)
