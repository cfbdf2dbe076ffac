"""Runs conversations turn by turn through the routers, and what their turns took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

from benchmarks.sessions.conversations import Message, TwoTurns
from treeserve_client import Completion, GenerateParams

GROUP = 4  # conversations whose first turns come before the second turn of any of them
ANSWER_TOKENS = 32


class Completes(Protocol):
    """What a client has to offer."""

    async def complete(self, *, deadline_s: float | None = None, **params: Unpack[GenerateParams]) -> Completion:
        """Generate and wait for all of it."""


@dataclass(frozen=True)
class Turn:
    """One turn as its client saw it."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """Both turns of a conversation."""

    first: Turn
    second: Turn

    @property
    def ratio(self) -> float:
        """Time to the first token of the second turn over that of the first, which is cold and a little shorter."""
        return self.second.ttft_ms / self.first.ttft_ms


async def run_conversations(
    conversations: Sequence[TwoTurns], clients: Sequence[Completes], *, speculation: bool, deadline_s: float
) -> list[Pair]:
    """Run them, one request at a time, a group's first turns before its second ones.

    Args:
        clients: one for each router. The second turn goes to the router after the one that had the first.

    Raises:
        TreeserveClientError: if a turn fails.
    """
    pairs = []
    for start in range(0, len(conversations), GROUP):
        group = list(enumerate(conversations[start : start + GROUP], start))
        answers: list[Completion] = []
        for number, conversation in group:
            client = clients[number % len(clients)]
            answers.append(await _turn(client, conversation.first(), number, speculation, deadline_s))
        for (number, conversation), first in zip(group, answers, strict=True):
            client = clients[(number + 1) % len(clients)]
            second = await _turn(client, conversation.second(first.text), number, speculation, deadline_s)
            pairs.append(Pair(_seen(first), _seen(second)))
    return pairs


async def _turn(
    client: Completes, messages: Sequence[Message], number: int, speculation: bool, deadline_s: float
) -> Completion:
    return await client.complete(
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        session_id=f"conversation-{number}",
        speculation=speculation,
        deadline_s=deadline_s,
    )


def _seen(completion: Completion) -> Turn:
    usage = completion.usage
    return Turn(completion.timing.ttft_ms, usage.prompt_tokens, usage.cached_tokens, completion.token_ids)


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians of a setting.

    Returns:
        cold_ttft_ms, second_ttft_ms; second_over_cold: median of the conversations' ratios; prefix_hit_rate: share of
        the second turns' prompt tokens that a verifier still held; first_turn_hit_rate: likewise, which should be next
        to nothing; prompt_tokens: medians of both turns.
    """
    first, second = [p.first for p in pairs], [p.second for p in pairs]
    return {
        "conversations": len(pairs),
        "prompt_tokens": [statistics.median(t.prompt_tokens for t in turns) for turns in (first, second)],
        "cold_ttft_ms": statistics.median(t.ttft_ms for t in first),
        "second_ttft_ms": statistics.median(t.ttft_ms for t in second),
        "second_over_cold": statistics.median(p.ratio for p in pairs),
        "worst_second_over_cold": max(p.ratio for p in pairs),
        "prefix_hit_rate": hit_rate(second),
        "first_turn_hit_rate": hit_rate(first),
    }


def hit_rate(turns: Sequence[Turn]) -> float:
    """Share of the prompts' tokens that did not have to be computed."""
    return sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns)


def same_answers(settings: Mapping[str, Sequence[Pair]]) -> float:
    """Share of the turns that gave the same tokens in all settings."""
    answers = [[(p.first.token_ids, p.second.token_ids) for p in row] for row in zip(*settings.values(), strict=True)]
    return sum(len({turns[i] for turns in row}) == 1 for row in answers for i in (0, 1)) / (2 * len(answers))
