"""The requests of a run: mixed temperatures, filters, penalties, seeds, lengths and ends, the same ones every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from treeserve_client import GenerateParams
from treeserve_client.request import ServiceClass

_SUBJECTS = (
    "a lighthouse",
    "the tax on salt",
    "sorting a list",
    "two rivers",
    "bread",
    "the number seven",
    "a lost key",
)
_PROMPTS = (
    "Write a short story about {0}.\n",
    "Q: What should everybody know about {0}?\nA:",
    "Repeat after me: {0} and {1}, {0} and {1}, {0} and",
    "def describe():\n    # prints ten facts about {0}\n",
    "A list of reasons to think of {0} rather than of {1}:\n1.",
)
_CLASSES: tuple[ServiceClass, ...] = ("realtime", "interactive", "standard", "batch")
_TEMPERATURES = (0.0, 0.0, 0.4, 0.8, 1.0, 1.3)


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        seed: also its number.
    """

    seed: int
    params: GenerateParams


def cases(count: int, max_tokens: tuple[int, int]) -> list[Case]:
    """The first `count` requests, each with between `max_tokens` tokens of output unless it ends by itself."""
    return [Case(seed, _params(seed, max_tokens)) for seed in range(count)]


def _params(seed: int, max_tokens: tuple[int, int]) -> GenerateParams:
    rng = random.Random(seed)
    subjects = rng.sample(_SUBJECTS, 2)
    prompt = rng.choice(_PROMPTS).format(*subjects)
    params = GenerateParams(
        prompt=prompt * rng.choice((1, 1, 1, 8)),  # some are long: their prefill takes a while
        seed=seed,
        temperature=rng.choice(_TEMPERATURES),
        max_tokens=rng.randint(*max_tokens),
        ignore_eos=rng.random() < 0.7,
        service_class=rng.choice(_CLASSES),
        ttft_ms=60_000.0,  # none is to be refused because it would be late
    )
    if rng.random() < 0.5:
        params["top_p"] = rng.choice((0.7, 0.9, 0.95))
    if rng.random() < 0.3:
        params["top_k"] = rng.choice((5, 40))
    if rng.random() < 0.4:
        params["repetition_penalty"] = rng.choice((1.05, 1.2))
    if rng.random() < 0.3:
        params["presence_penalty"], params["frequency_penalty"] = 0.4, 0.3
    if rng.random() < 0.2:
        params["stop"] = ["\n\n", "because"]
    if rng.random() < 0.2:
        params["top_log_probs"] = 2
    if rng.random() < 0.3:
        params["session_id"] = f"session-{seed}"  # turns of one session never run side by side
    return params
