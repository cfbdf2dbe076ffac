"""Admission: what an ask becomes, and what is refused before anything is queued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.router_rig import load_tokenizer

from treeserve_core.errors import InvalidArgumentError, NotFoundError
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_router.admission import MAX_INPUT_BYTES, OPEN_ENDED, Admission, Ask, RouterRequest
from treeserve_text.tokenizer import Tokenizer

WINDOW = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def admission(tokenizer: Tokenizer) -> Admission:
    return Admission(tokenizer, "tiny", draw_seed=lambda: 77, draw_id=lambda: "drawn")


def ask(**fields: Any) -> Ask:
    if not {"prompt", "messages", "token_ids"} & fields.keys():
        fields["token_ids"] = [5, 6, 7]
    fields.setdefault("sampling", SamplingParams())
    fields.setdefault("stopping", StoppingCriteria(max_tokens=8))
    return Ask(**fields)


async def admit(admission: Admission, ask: Ask) -> RouterRequest:
    admission.check(ask)
    return await admission.admit(ask, WINDOW)


async def test_seed_and_id_are_drawn_only_if_absent(admission: Admission) -> None:
    drawn = await admit(admission, ask())
    assert (drawn.sampling.seed, drawn.request_id) == (77, "drawn")
    given = await admit(admission, ask(sampling=SamplingParams(seed=0), seed_given=True, request_id="a.B_c:1-2"))
    assert (given.sampling.seed, given.request_id) == (0, "a.B_c:1-2")


async def test_open_ended_output_fills_the_window(admission: Admission) -> None:
    request = await admit(admission, ask(stopping=StoppingCriteria(max_tokens=OPEN_ENDED)))
    assert request.stopping.max_tokens == WINDOW - 3
    assert request.max_total_tokens == WINDOW


async def test_the_window_is_filled_exactly_and_not_exceeded(admission: Admission) -> None:
    await admit(admission, ask(stopping=StoppingCriteria(max_tokens=WINDOW - 3)))
    with pytest.raises(InvalidArgumentError, match=r"stopping\.max_tokens"):
        await admit(admission, ask(stopping=StoppingCriteria(max_tokens=WINDOW - 2)))
    with pytest.raises(InvalidArgumentError, match=r"tokens\.token_ids.*no room"):
        await admit(admission, ask(token_ids=[1] * WINDOW))


async def test_long_text_is_tokenised_in_a_thread_as_short_text_is(admission: Admission, tokenizer: Tokenizer) -> None:
    for text in ("one two three", "one two three " * 500):
        request = await admission.admit(ask(prompt=text), 100_000)
        assert request.prompt_token_ids == tuple(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "ä"}, "request_id"),
        ({"request_id": "x\n"}, "request_id"),
        ({"prompt": "x", "token_ids": [1]}, "input"),
        ({"prompt": "x" * (MAX_INPUT_BYTES + 1)}, "prompt"),
        ({"prompt": "ä" * (MAX_INPUT_BYTES // 2 + 1)}, "prompt"),
        ({"token_ids": [1] * (MAX_INPUT_BYTES + 1)}, "tokens.token_ids"),
        ({"token_ids": [-1]}, "tokens.token_ids"),
        ({"messages": []}, "chat.messages"),
        ({"messages": [{"role": "user", "content": "x" * MAX_INPUT_BYTES}] * 2}, "chat.messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "chat.messages[0].role"),
        ({"generated_token_ids": [1], "sampling": SamplingParams(temperature=1.0)}, "sampling.seed"),
        ({"generated_token_ids": [10**6]}, "generated_token_ids"),
    ],
)
def test_refused_before_tokenising(admission: Admission, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        admission.check(ask(**fields))
    assert caught.value.field == field


async def test_what_the_chat_template_refuses_is_named_by_its_field(tmp_path: Path) -> None:
    picky = Admission(load_tokenizer(tmp_path, "{{ raise_exception('system first') }}"), "tiny")
    with pytest.raises(InvalidArgumentError) as caught:
        await picky.admit(ask(messages=[{"role": "user", "content": "x"}]), WINDOW)
    assert caught.value.field == "chat.messages"
    assert "system first" in caught.value.reason


def test_an_input_is_required(admission: Admission) -> None:
    with pytest.raises(InvalidArgumentError, match="input"):
        admission.check(replace(ask(), token_ids=None))


def test_the_model_is_known_or_left_out(admission: Admission) -> None:
    admission.check(ask(model="tiny"))
    with pytest.raises(NotFoundError):
        admission.check(ask(model="Tiny"))


async def test_resuming(admission: Admission) -> None:
    request = await admit(admission, ask(generated_token_ids=[1, 2]))  # greedy: no seed needed
    assert request.generated_token_ids == (1, 2)
    with pytest.raises(InvalidArgumentError, match="generated_token_ids"):
        await admit(admission, ask(generated_token_ids=[1] * 9))
    assert (await admit(admission, ask(generated_token_ids=[1] * 8))).stopping.max_tokens == 8
