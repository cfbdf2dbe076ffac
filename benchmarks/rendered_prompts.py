"""The prompts of the six kinds of task, rendered with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.acceptance.tasks import own_prompts
from benchmarks.peers.tasks import TASKS, Conversation, load_tasks
from treeserve_text.tokenizer import Tokenizer

Prompts = Mapping[str, Sequence[tuple[int, ...]]]


def conversations() -> dict[str, list[Conversation]]:
    """By kind, those of the benchmarks of peers and of acceptance, each once."""
    sets = (load_tasks(), own_prompts())
    return {task: [conversation for tasks in sets for conversation in tasks[task]] for task in TASKS}


def rendered_prompts(tokenizer: Tokenizer) -> Prompts:
    """Token ids of each, by kind."""
    return {task: [tuple(tokenizer.render_chat(c)) for c in ours] for task, ours in conversations().items()}
