"""Makes one shard of training data: writes prompts, has the target answer them, and drops what is no use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treeserve_text.tokenizer import Tokenizer
from treeserve_training.answering import Answer, Answerer, Task
from treeserve_training.prompts import Material, Message, Prompt, PromptWriter, usable_request
from treeserve_training.records import Sample

_MAX_TOKENS = 256
# What a shard is made of. The first four are answered first, and the rest is made of the answers.
_OPENINGS, _PASSAGES, _PROGRAMS, _FIRST_TURNS, _PROMPTS = 180, 64, 24, 40, 460
_OPENING_TOKENS, _PASSAGE_TOKENS = 128, 176
_USER_PROMPTS = 512
# Temperatures with their shares. What is to be read again is mostly written at a low one, which keeps it sensible.
Temperatures = Mapping[float, float]
_TEMPERATURES: Temperatures = {0.0: 0.68, 1.0: 0.32}
_MATERIAL_TEMPERATURES: Temperatures = {0.0: 0.3, 0.6: 0.5, 1.0: 0.2}
_REQUEST_TEMPERATURE = 0.8
_MIN_KEPT = 16  # tokens of an answer before it falls into a loop
_MAX_IDS_16 = 1 << 16
# Stands where the user's message begins.
_MARK = "Mark"

Shard = tuple[list[Sample], Counter[str]]


@dataclass(frozen=True)
class _Asked:
    prompt: Prompt
    task: Task


class ShardMaker:
    """Makes shards; each follows from the seed and its index alone."""

    def __init__(self, tokenizer: Tokenizer, answerer: Answerer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._answerer = answerer
        self._seed = seed
        self._ids = np.uint16 if tokenizer.vocab_size <= _MAX_IDS_16 else np.uint32

    def make(self, index: int) -> Shard:
        """A shard of prompts made here. The counts beside it say how many tokens, samples and dropped answers."""
        rng = np.random.default_rng([self._seed, index])
        writer = PromptWriter(rng)
        counts: Counter[str] = Counter()
        material = Material(requests=self._requests(writer, rng, counts))
        passages = [writer.passage() for _ in range(_PASSAGES)]
        programs = [writer.program() for _ in range(_PROGRAMS)]
        turns = [writer.first_turn() for _ in range(_FIRST_TURNS)]
        first = [*passages, *programs, *turns]
        samples = self._answered(first, rng, _PASSAGE_TOKENS, counts, _MATERIAL_TEMPERATURES, material)
        prompts = [writer.from_material(material) for _ in range(_PROMPTS)]
        samples += self._answered(prompts, rng, _MAX_TOKENS, counts, _TEMPERATURES)
        return samples, counts

    def make_from(self, prompts: Sequence[tuple[Message, ...]], index: int) -> Shard:
        """A shard of a user's prompts: all of them greedily first, then over and over at temperature 1."""
        rng = np.random.default_rng([self._seed, index])
        counts: Counter[str] = Counter()
        shards_a_round = -(-len(prompts) // _USER_PROMPTS)
        part = prompts[index % shards_a_round :: shards_a_round]
        asked = [Prompt("user", messages) for messages in part]
        temperature = 0.0 if index < shards_a_round else 1.0
        return self._answered(asked, rng, _MAX_TOKENS, counts, {temperature: 1.0}), counts

    def _requests(self, writer: PromptWriter, rng: np.random.Generator, counts: Counter[str]) -> list[str]:
        """Messages that the target writes in the user's place."""
        openings = [writer.opening() for _ in range(_OPENINGS)]
        tasks = [Task(self._open_ids(o), _OPENING_TOKENS, _REQUEST_TEMPERATURE, _seed(rng)) for o in openings]
        requests: list[str] = []
        for opening, answer in zip(openings, self._answerer.answer(tasks), strict=True):
            text = (opening[-1]["content"] + self._tokenizer.decode(answer.output_ids)).strip()
            if answer.ended and usable_request(text, requests):
                requests.append(text)
        counts["requests"] += len(requests)
        counts["requests_dropped"] += len(openings) - len(requests)
        return requests

    def _answered(
        self,
        prompts: Sequence[Prompt],
        rng: np.random.Generator,
        max_tokens: int,
        counts: Counter[str],
        temperatures: Temperatures,
        material: Material | None = None,
    ) -> list[Sample]:
        asked = [self._ask(prompt, rng, max_tokens, temperatures) for prompt in prompts]
        fitting = [a for a in asked if len(a.task.prompt_ids) + max_tokens <= self._answerer.max_positions]
        counts["too_long"] += len(asked) - len(fitting)
        samples = []
        for one, answer in zip(fitting, self._answerer.answer([a.task for a in fitting]), strict=True):
            counts["loops"] += answer.looped
            if answer.looped and len(answer.output_ids) < _MIN_KEPT:
                counts["loops_dropped"] += 1
                continue
            samples.append(self._sample(one, answer))
            if material is not None and not answer.looped and one.task.temperature < 1.0:
                self._keep(material, one.prompt, answer)
        counts["samples"] += len(samples)
        counts["tokens"] += sum(len(sample.output_ids) for sample in samples)
        return samples

    def _ask(self, prompt: Prompt, rng: np.random.Generator, max_tokens: int, temperatures: Temperatures) -> _Asked:
        temperature = float(rng.choice(list(temperatures), p=list(temperatures.values())))
        ids = tuple(self._tokenizer.render_chat(prompt.messages))
        return _Asked(prompt, Task(ids, max_tokens, temperature, _seed(rng)))

    def _keep(self, material: Material, prompt: Prompt, answer: Answer) -> None:
        """Add an answer to what further prompts are made of."""
        text = self._tokenizer.decode(answer.output_ids).strip()
        if prompt.kind == "passage":
            material.passages.append(text if answer.ended else text[: text.rfind(".") + 1] or text)
        elif prompt.kind == "code":
            material.programs.append(_code_in(text))
        elif answer.ended:
            material.conversations.append((*prompt.messages, {"role": "assistant", "content": text}))

    def _sample(self, asked: _Asked, answer: Answer) -> Sample:
        return Sample(
            prompt_ids=asked.task.prompt_ids,
            output_ids=answer.output_ids,
            kind=asked.prompt.kind,
            temperature=asked.task.temperature,
            seed=asked.task.seed,
            top_ids=answer.top_ids.astype(self._ids),
            top_log_probs=answer.top_log_probs,
        )

    def _open_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation that breaks off within the user's message."""
        *before, user = messages
        marked = [*before, {"role": "user", "content": user["content"] + _MARK}]
        ids = self._tokenizer.render_chat(marked)
        text = self._tokenizer.decode(ids, skip_special=False)
        head = text[: text.rindex(_MARK)]
        kept = next(n for n in range(len(ids), -1, -1) if head.startswith(self._tokenizer.decode(ids[:n], False)))
        return tuple(ids[:kept])


def _code_in(text: str) -> str:
    """What stands in the first fence of an answer; all of it if there is none."""
    fenced = re.search(r"```\w*\n(.+?)(?:```|$)", text, re.DOTALL)
    return fenced[1].rstrip() if fenced else text


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 63))
