"""Prompts are made reproducibly, of all kinds, without blanks left open, and none is one of a benchmark's."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

from treeserve_training.prompts import Material, Prompt, PromptWriter, usable_request

ROOT = Path(__file__).resolve().parents[2]
PASSAGES = [
    "The harbour of Lindow was built in 1820. It has two piers. Ships from Norway call there every week.",
    "Dear Otto, thank you for the kind letter. My garden is full of beans. Please come soon! Yours, Mia",
]


def material() -> Material:
    return Material(
        requests=[f"What is the tallest animal on island {i}?" for i in range(40)],
        passages=PASSAGES,
        programs=["def add(a, b):\n    return a + b"],
        conversations=[({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."})],
    )


def drawn(seed: int, n: int) -> list[Prompt]:
    writer, given = PromptWriter(np.random.default_rng(seed)), material()
    made = [writer.passage() for _ in range(n // 8)] + [writer.program() for _ in range(n // 8)]
    return made + [writer.first_turn() for _ in range(n // 8)] + [writer.from_material(given) for _ in range(n)]


def test_equal_seeds_give_equal_prompts() -> None:
    assert drawn(3, 80) == drawn(3, 80)
    assert drawn(3, 80) != drawn(4, 80)


def test_prompts_are_various() -> None:
    prompts = drawn(0, 3000)
    kinds = Counter(prompt.kind for prompt in prompts)
    assert len(kinds) >= 12 and min(kinds.values()) > 20
    # There is one conversation here to follow up, and one program to edit.
    made = [p.messages[-1]["content"] for p in prompts if p.kind not in ("follow_up", "code_edit")]
    assert len(set(made)) > 0.85 * len(made)
    own = [p.messages[-1]["content"] for p in prompts if p.kind == "self"]
    assert len(set(own)) == len(own) == 40, "what the target wrote in a user's name is asked once"


def test_kinds_without_material_are_left_out() -> None:
    writer = PromptWriter(np.random.default_rng(0))
    kinds = {writer.from_material(Material()).kind for _ in range(300)}
    assert {"qa", "code", "story"} <= kinds and kinds.isdisjoint({"self", "follow_up", "code_edit", "summary"})


def test_every_blank_is_filled() -> None:
    for prompt in drawn(1, 3000):
        for message in prompt.messages:
            assert not re.search(r"\{\w*\}", message["content"]), message["content"]


def test_conversations_are_well_formed() -> None:
    for prompt in drawn(2, 500):
        roles = [message["role"] for message in prompt.messages]
        assert roles[-1] == "user"
        assert all(message["content"].strip() for message in prompt.messages)
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
    assert {len(p.messages) for p in drawn(2, 500) if p.kind == "follow_up"} == {3}


def test_texts_to_correct_have_mistakes() -> None:
    writer = PromptWriter(np.random.default_rng(0))
    misspelt = [writer.correction(material()) for _ in range(50)]
    whole = sum(any(passage in prompt for passage in PASSAGES) for prompt in misspelt)
    assert whole < 15, "one word in eight is misspelt, and the passages have about twenty"
    assert len(set(misspelt)) > 40


def test_no_prompt_is_near_one_of_a_benchmark() -> None:
    held_out = [
        words(message["content"])
        for path in (ROOT / "benchmarks").glob("*/prompts/*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        for message in json.loads(line).get("messages", [])
        if message["role"] == "user"
    ]
    assert held_out
    for prompt in drawn(5, 1000):
        own = words(prompt.messages[-1]["content"])
        assert all(len(own & other) < 0.7 * len(own | other) for other in held_out)


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def test_messages_that_make_no_sense_are_not_used() -> None:
    assert usable_request("What is the tallest animal in Africa?", [])
    assert not usable_request("Hello", [])
    assert not usable_request("ah ah ah ah ah ah ah ah ah ah ah ah ah ah", [])
    assert not usable_request("1 2 3 4 5 6 7 8 9 10 11 12 13 14", [])
    assert not usable_request("東京タワーの高さは何メートルですか、教えてください", [])
    assert not usable_request("why " * 400, [])


def test_a_message_much_like_another_is_not_used() -> None:
    others = ["How do I bake bread?", "What is the tallest animal in Africa?"]
    assert not usable_request("What is the tallest animal in Africa now?", others)
    assert usable_request("What is the fastest animal in the sea?", others)
