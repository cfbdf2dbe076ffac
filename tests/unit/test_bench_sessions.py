"""The benchmark of sessions: its conversations, which router a turn goes to, and what is made of the turns."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from rich.console import Console

from benchmarks.rendered_prompts import conversations
from benchmarks.sessions import run
from benchmarks.sessions.conversations import TwoTurns, all_texts, make_conversations
from benchmarks.sessions.turns import Pair, Turn, figures, run_conversations, same_answers
from treeserve_client import Completion, SpeculationStats, Timing, Usage
from treeserve_text.tokenizer import Tokenizer


class Words:
    """A tokenizer of words; each message costs three more."""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[str]:
        return [word for message in messages for word in (*message["content"].split(), "<", ">", "\n")]

    def encode(self, text: str) -> list[str]:
        return text.split()

    def decode(self, words: Sequence[str]) -> str:
        return " ".join(words)


TEXTS = [" ".join(f"w{i}-{j}" for j in range(20 + 7 * i)) for i in range(12)]


def make(count: int, tokens: int) -> list[TwoTurns]:
    return make_conversations(TEXTS, cast("Tokenizer", Words()), count, tokens, random.Random(5))


@pytest.mark.parametrize("tokens", [100, 250, 400])
def test_histories_have_the_wanted_length_and_differ_from_the_first_word_on(tokens: int) -> None:
    made = make(8, tokens)
    for conversation in made:
        assert abs(len(Words().render_chat(conversation.first())) - tokens) <= 8
        roles = [message["role"] for message in conversation.second("So it is.")]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert conversation.second("So it is.")[: len(conversation.first())] == conversation.first()
        assert conversation.questions[0] != conversation.questions[1]
    assert len({conversation.history[0]["content"].split()[0] for conversation in made}) == 8
    assert make(8, tokens) == made


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="13 conversations"):
        make(13, 100)
    with pytest.raises(ValueError, match="fewer than"):
        make(1, 100_000)


def test_there_is_text_for_the_full_plan() -> None:
    texts = all_texts(conversations())
    assert len(texts) == len(set(texts)) >= run.FULL.conversations
    assert sum(len(text.split()) for text in texts) > 2 * run.FULL.history_tokens


@dataclass(eq=False)
class FakeRouter:
    """Answers from what it was sent before, in whichever session."""

    name: str
    journal: list[tuple[str, str, int, bool]]
    answers: dict[str, str] = field(default_factory=dict)

    async def complete(self, *, deadline_s: float | None = None, **params: Any) -> Completion:
        session, messages = params["session_id"], params["messages"]
        self.journal.append((self.name, session, len(messages), params["speculation"]))
        turn = sum(1 for _, earlier, _, _ in self.journal if earlier == session)
        if turn == 2:
            assert messages[-2] == {"role": "assistant", "content": f"answer to {session}"}
        usage = Usage(100 * turn, 32, 90 * (turn - 1))
        timing = Timing(500.0 / turn**2, 5.0, 700.0)
        return Completion(
            (turn, len(messages)), f"answer to {session}", (), "length", None, usage, SpeculationStats(), timing
        )


@pytest.mark.parametrize("routers", [1, 3])
async def test_each_second_turn_goes_to_the_next_router_after_all_first_turns_of_its_group(routers: int) -> None:
    journal: list[tuple[str, str, int, bool]] = []
    clients = [FakeRouter(f"router-{i}", journal) for i in range(routers)]
    pairs = await run_conversations(make(6, 100), clients, speculation=False, deadline_s=5.0)
    assert len(pairs) == 6 and {line[3] for line in journal} == {False}
    order = [int(session.removeprefix("conversation-")) for _, session, _, _ in journal]
    assert order == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 4, 5]
    where = {n: [router for router, session, _, _ in journal if session == f"conversation-{n}"] for n in range(6)}
    for number, (first, second) in where.items():
        assert (first, second) == (f"router-{number % routers}", f"router-{(number + 1) % routers}")
    assert pairs[0].ratio == 0.25
    assert figures(pairs)["prefix_hit_rate"] == 0.45
    assert figures(pairs)["first_turn_hit_rate"] == 0.0


def pair(cold_ms: float, second_ms: float, cached: int, tokens: tuple[int, ...] = (1,)) -> Pair:
    return Pair(Turn(cold_ms, 100, 0, tokens), Turn(second_ms, 150, cached, tokens))


def test_figures_take_the_ratio_of_each_conversation() -> None:
    found = figures([pair(100, 20, 90), pair(400, 40, 60), pair(100, 90, 0)])
    assert (found["second_over_cold"], found["worst_second_over_cold"]) == (0.2, 0.9)
    assert (found["cold_ttft_ms"], found["second_ttft_ms"]) == (100, 40)
    assert found["prefix_hit_rate"] == pytest.approx(150 / 450)
    assert found["prompt_tokens"] == [100, 150]


def test_answers_are_compared_turn_by_turn_across_settings() -> None:
    same = {"1 on": [pair(1, 1, 0), pair(1, 1, 0, (2,))], "1 off": [pair(1, 1, 0), pair(1, 1, 0, (3,))]}
    assert same_answers(same) == 0.5


def test_the_table_has_every_setting() -> None:
    result = {
        "plan": {"history_tokens": 1500},
        "by_routers": {r: {name: figures([pair(100, 20, 90)]) for name in ("on", "off")} for r in ("1", "3")},
    }
    console = Console(record=True, width=120)
    run.show(result, console)
    assert console.export_text().count("60.0%") == 4
    json.dumps(result)


def test_options_of_the_command_line() -> None:
    assert run.parse_options([]).plan == run.FULL and run.FULL.routers == (1, 3) and run.FULL.history_tokens == 1500
    assert run.parse_options(["--quick"]).plan == run.QUICK
    with pytest.raises(SystemExit):
        run.parse_options(["--treeserve-set", "threads"])
