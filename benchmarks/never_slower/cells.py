"""The cells of the table, concurrency by kind of task: what runs in each, and how on and off compare there."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.peer import Reply
from benchmarks.peers.tasks import Request
from benchmarks.peers.treeserve import OFF, ON

LEAST = 0.98
_TEMPERATURE = 0.8
_LENGTHS = (1.0, 0.5, 1.5, 0.75, 1.25)  # of the mean: those that begin together must not end together, nor begin again

Generate = Callable[[str, Sequence[Request], int], list[Reply]]


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        concurrencies: how many requests run at once.
        rounds: pairs of each cell.
        least_requests: requests of a cell that end while as many others go on; never fewer than run at once.
        max_tokens: output tokens of a request, on average.
        seed: of the order of on and off.
    """

    concurrencies: tuple[int, ...]
    rounds: int
    least_requests: int
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Pair:
    """The same requests of one task with speculation and without, one right after the other."""

    concurrency: int
    task: str
    on: tuple[Reply, ...]
    off: tuple[Reply, ...]

    @property
    def ratio(self) -> float:
        """Throughput with speculation over without."""
        return tokens_per_s(self.on) / tokens_per_s(self.off)


def tokens_per_s(replies: Sequence[Reply]) -> float:
    """Output tokens per second, prefill included, while as many requests ran as should: until the last one began.

    After that fewer and fewer run, and a step pays less. Speculation makes some requests quicker than others and so
    that time longer, which says nothing of what it does where requests keep coming. Of a request that ends later, the
    part counts that its time until then is of its whole time, its prompt's included.
    """
    until = max(r.began for r in replies)
    tokens = sum(r.num_tokens * min(1.0, (until - r.began) / (r.ended - r.began)) for r in replies)
    return tokens / (until - min(r.began for r in replies))


def make_requests(
    task: str, prompts: Sequence[Sequence[int]], count: int, first: int, max_tokens: int
) -> list[Request]:
    """`count` requests of one task: prompts from number `first` on, around the end.

    Every other one is sampled. A prompt that comes again is sampled with another seed, so that no two requests give the
    same tokens. They have `max_tokens` on average.
    """
    requests = []
    for i in range(first, first + count):
        turn, number = divmod(i, len(prompts))
        temperature = _TEMPERATURE if turn or number % 2 else 0.0
        length = round(max_tokens * _LENGTHS[i % len(_LENGTHS)])
        requests.append(Request(task, tuple(prompts[number]), length, temperature, seed=i))
    return requests


def run_round(
    plan: Plan, index: int, prompts: Mapping[str, Sequence[Sequence[int]]], generate: Generate, order: random.Random
) -> list[Pair]:
    """One pair of every cell, in random order; which of on and off comes first is drawn for each."""
    cells = [(concurrency, task) for concurrency in plan.concurrencies for task in prompts]
    pairs = []
    for concurrency, task in order.sample(cells, len(cells)):
        count = concurrency + max(concurrency, plan.least_requests)
        requests = make_requests(task, prompts[task], count, index * count, plan.max_tokens)
        replies = {}
        for system in order.sample((ON, OFF), 2):
            replies[system] = tuple(generate(system, requests, concurrency))
        pairs.append(Pair(concurrency, task, replies[ON], replies[OFF]))
    return pairs


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The table.

    Returns:
        on_over_off[concurrency][task]: median ratio of the pairs; spread: the least and the greatest; tokens_per_s of
        both: medians; tokens_per_step[concurrency][task] with speculation; worst: the lowest cell; slower:
        cells under 0.98; on_equals_off: share of requests with the same tokens.
    """
    places = sorted({pair.concurrency for pair in pairs})
    tasks = list(dict.fromkeys(pair.task for pair in sorted(pairs, key=lambda pair: pair.task)))

    def table(measure: Callable[[Sequence[Pair]], Any]) -> dict[str, dict[str, Any]]:
        return {
            str(concurrency): {
                task: measure(ours)
                for task in tasks
                if (ours := [p for p in pairs if (p.concurrency, p.task) == (concurrency, task)])
            }
            for concurrency in places
        }

    ratios = table(lambda ours: statistics.median(p.ratio for p in ours))
    cells = [(ratio, concurrency, task) for concurrency, row in ratios.items() for task, ratio in row.items()]
    worst = min(cells)
    return {
        "on_over_off": ratios,
        "spread": table(lambda ours: [min(p.ratio for p in ours), max(p.ratio for p in ours)]),
        "tokens_per_s": {
            "on": table(lambda ours: statistics.median(tokens_per_s(p.on) for p in ours)),
            "off": table(lambda ours: statistics.median(tokens_per_s(p.off) for p in ours)),
        },
        "tokens_per_step": table(
            lambda ours: sum(r.num_tokens for p in ours for r in p.on) / sum(r.steps for p in ours for r in p.on)
        ),
        "worst": {"concurrency": int(worst[1]), "task": worst[2], "on_over_off": worst[0]},
        "slower": [{"concurrency": int(c), "task": t, "on_over_off": r} for r, c, t in sorted(cells) if r < LEAST],
        "on_equals_off": statistics.mean(
            on.token_ids == off.token_ids for p in pairs for on, off in zip(p.on, p.off, strict=True)
        ),
    }
