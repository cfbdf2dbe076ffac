"""The prompts: nine kinds of task written for this benchmark, and files in the layouts that others use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.tasks import Conversation, load_tasks

TASKS = (
    "chat",
    "story",
    "code",
    "summary",
    "rewrite",
    "extraction",
    "translation",
    "question_answering",
    "how_to",
)
FOLDER = Path(__file__).parent / "prompts"
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def own_prompts() -> dict[str, list[Conversation]]:
    """The prompts of this benchmark by task."""
    return load_tasks(FOLDER, TASKS)


def prompts_of_file(path: Path) -> dict[str, list[Conversation]]:
    """Conversations of a file by task, each ending with a user's message.

    Each line, or each element of a JSON list, is one of

        {"question_id": 1, "category": "writing", "turns": ["...", ...]}      Spec-Bench: the first turn
        {"conversations": [{"from": "human", "value": "..."}, ...]}           ShareGPT: up to the last human turn
        {"messages": [{"role": "user", "content": "..."}, ...]}               likewise
        {"prompt": "..."}

    Tasks are called by the file and the category if there is one; entries without a user's message are left out.

    Raises:
        ValueError: for what is none of these.
    """
    tasks: dict[str, list[Conversation]] = {}
    for number, entry in enumerate(_entries(path), start=1):
        try:
            conversation = _conversation(entry)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name}, entry {number} has no layout known here: {error!r}") from error
        category = entry.get("category")
        task = f"{path.stem}/{category}" if category else path.stem
        if conversation:
            tasks.setdefault(task, []).append(conversation)
    return tasks


def _entries(path: Path) -> Iterator[Mapping[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())


def _conversation(entry: Mapping[str, Any]) -> Conversation:
    """The messages of an entry up to the last one of a user."""
    if "turns" in entry:
        return [{"role": "user", "content": str(entry["turns"][0])}]
    if "prompt" in entry:
        return [{"role": "user", "content": str(entry["prompt"])}]
    if "conversations" in entry:
        messages = [
            {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
            for turn in entry["conversations"]
        ]
    else:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in entry["messages"]]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages
