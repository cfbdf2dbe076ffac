"""The prompts: six kinds of task, written for this benchmark and held out from all training of drafters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS = ("chat", "story", "code", "summary", "rewrite", "extraction")
# Tasks whose answer is mostly a copy of the prompt.
COPY_HEAVY = ("rewrite",)

Conversation = Sequence[Mapping[str, str]]
_FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Request:
    """One generation to run: rendered prompt, output length, greedy unless it says otherwise.

    Attributes:
        temperature, seed, ignore_eos: treeserve's alone; the peers decode greedily to the full length.
    """

    task: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True


# The first request of all to a system. Any prompt will do; this one is of no task.
FIRST = Request("first", (1, 2, 3, 4), 1)


def load_tasks(folder: Path = _FOLDER, tasks: Sequence[str] = TASKS) -> dict[str, list[Conversation]]:
    """The conversations of each task, from `folder`/<task>.jsonl with one ``{"messages": [...]}`` a line."""
    return {
        task: [json.loads(line)["messages"] for line in (folder / f"{task}.jsonl").read_text().splitlines()]
        for task in tasks
    }


def select_requests(
    tasks: Mapping[str, Sequence[Conversation]],
    render: Callable[[Conversation], Sequence[int]],
    count: int,
    first: int,
    max_tokens: int,
) -> list[Request]:
    """`count` requests, the tasks in turn; of each task the prompts from number `first` on, around the end.

    Raises:
        ValueError: if a prompt would come twice: drafters that remember would answer it from memory.
    """
    names = list(tasks)
    if count > len(names) * min(map(len, tasks.values())):
        raise ValueError(f"{count} requests, but only {min(map(len, tasks.values()))} prompts of each task")
    requests = []
    for i in range(count):
        task = names[i % len(names)]
        conversation = tasks[task][(first + i // len(names)) % len(tasks[task])]
        requests.append(Request(task, tuple(render(conversation)), max_tokens))
    return requests
