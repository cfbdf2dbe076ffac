"""Writes prompts of many kinds, from word lists and from what the target itself has written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from treeserve_training import task_templates as templates
from treeserve_training import word_lists as words

Message = Mapping[str, str]
Item = TypeVar("Item")

_SYSTEM_SHARE = 0.25
# Of their words, two messages that share this many are taken for the same.
_SAME_WORDS = 0.7


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target is to continue, and the kind of task it is."""

    kind: str
    messages: tuple[Message, ...]


@dataclass
class Material:
    """What the target wrote for other prompts to be made of."""

    requests: list[str] = field(default_factory=list)  # users' messages, each for one prompt
    passages: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    conversations: list[tuple[Message, ...]] = field(default_factory=list)  # each ends with an answer


class PromptWriter:
    """Draws prompts by one random generator: equal generators and material give equal prompts."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def opening(self) -> tuple[Message, ...]:
        """A conversation that breaks off within the user's message, for the target to go on with."""
        opening = self._pick(words.OPENINGS) if self._rng.random() < 0.6 else ""
        user = {"role": "user", "content": opening}
        return (*self._system(0.5), user)

    def passage(self) -> Prompt:
        """Asks for a text that other prompts can be about."""
        return self._prompt("passage", self._filled(words.PASSAGE_FORMS))

    def program(self) -> Prompt:
        """Asks for a program that other prompts can be about."""
        return self._prompt("code", self._filled(templates.CODE))

    def first_turn(self) -> Prompt:
        """Asks a question that a conversation can go on from."""
        return self._prompt("chat", self._filled(templates.QUESTIONS + templates.CHAT))

    def from_material(self, material: Material) -> Prompt:
        """A prompt of a kind drawn at random among those that there is material for."""
        kinds = {name: kind for name, kind in _KINDS.items() if kind.is_possible(material)}
        shares = np.array([kind.share for kind in kinds.values()])
        name = list(kinds)[int(self._rng.choice(len(kinds), p=shares / shares.sum()))]
        written = kinds[name].write(self, material)
        return self._prompt(name, written) if isinstance(written, str) else Prompt(name, written)

    def request(self, material: Material) -> str:
        """A user's message as the target wrote it, which is used up."""
        return material.requests.pop(int(self._rng.integers(len(material.requests))))

    def follow_up(self, material: Material) -> tuple[Message, ...]:
        """A conversation with one more message of the user."""
        return (*self._pick(material.conversations), {"role": "user", "content": self._filled(words.FOLLOW_UPS)})

    def task(self, forms: Sequence[str]) -> str:
        """A task that needs no text."""
        return self._filled(forms)

    def task_on(self, forms: Sequence[str], texts: Sequence[str], sentences: int = 12) -> str:
        """A task on one of the texts, which stands after it, before it or in quotes."""
        text = self._part(self._pick(texts), sentences)
        return self._layout(self._filled(forms), text)

    def correction(self, material: Material) -> str:
        """Asks to correct a text with mistakes put into it."""
        text = self._part(self._pick(material.passages), 5)
        return self._layout(self._filled(templates.CORRECTIONS), self._misspelt(text))

    def replacement(self, material: Material) -> str:
        """Asks to put one word for another throughout a text."""
        text = self._part(self._pick(material.passages), 6)
        found = re.findall(r"[A-Za-z]{4,}", text) or ["the"]
        form = self._pick(templates.REPLACEMENTS)
        instruction = form.format(old=self._pick(found), new=self._pick(words.TOPICS).split()[-1])
        return self._layout(instruction, text)

    def records(self, forms: Sequence[str]) -> str:
        """A task on a few invented records of one layout."""
        layout = self._pick(templates.RECORDS)
        lines = [self._filled((layout,)) for _ in range(self._rng.integers(2, 7))]
        return self._layout(self._filled(forms), self._pick(("\n", "\n", " ", "; ")).join(lines))

    def sentences(self, forms: Sequence[str], material: Material) -> str:
        """A task on one or two sentences: the target's or invented ones."""
        if self._rng.random() < 0.5:
            return self._layout(self._filled(forms), self._filled(templates.SENTENCES))
        return self.task_on(forms, material.passages, sentences=2)

    def _prompt(self, kind: str, content: str) -> Prompt:
        return Prompt(kind, (*self._system(_SYSTEM_SHARE), {"role": "user", "content": content}))

    def _system(self, share: float) -> tuple[Message, ...]:
        if self._rng.random() >= share:
            return ()
        return ({"role": "system", "content": self._filled(words.SYSTEM_PROMPTS)},)

    def _layout(self, instruction: str, text: str) -> str:
        return self._pick(templates.LAYOUTS).format(instruction=instruction, text=text)

    def _filled(self, forms: Sequence[str]) -> str:
        """One of the forms, each of its blanks filled in afresh."""
        form = self._pick(forms)
        return re.sub(r"\{(\w+)\}", lambda blank: self._fill(blank[1]), form)

    def _fill(self, blank: str) -> str:
        if blank == "topic":
            return self._pick(words.ASPECTS if self._rng.random() < 0.6 else ("{}",)).format(self._pick(words.TOPICS))
        if blank == "full_name":
            return f"{self._pick(words.FIRST_NAMES)} {self._pick(words.LAST_NAMES)}"
        if blank == "n":
            return str(self._rng.integers(2, 13))
        if blank == "number":
            return str(self._rng.integers(2, 10 ** self._rng.integers(1, 5)))
        if blank == "price":
            return f"{self._rng.integers(100, 90000) / 100:.2f}"
        if blank == "date":
            return f"{self._rng.integers(1, 29)} {self._pick(templates.MONTHS)} {self._rng.integers(1990, 2030)}"
        return self._pick(_BLANKS[blank])

    def _part(self, text: str, sentences: int) -> str:
        """The first sentences of a text."""
        return " ".join(re.split(r"(?<=[.!?]) (?=[A-Z])", text)[:sentences])

    def _misspelt(self, text: str) -> str:
        """About every eighth word with a letter dropped, doubled or swapped with the next, or without its capital."""
        return " ".join(self._misspelt_word(w) if self._rng.random() < 0.12 else w for w in text.split(" "))

    def _misspelt_word(self, word: str) -> str:
        if len(word) < 4:
            return word.lower()
        i = int(self._rng.integers(1, len(word) - 1))
        return self._pick(
            (
                word[:i] + word[i + 1 :],
                word[:i] + word[i] + word[i:],
                word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :],
            )
        )

    def _pick(self, items: Sequence[Item]) -> Item:
        return items[int(self._rng.integers(len(items)))]


def usable_request(text: str, others: Sequence[str]) -> bool:
    """Whether a message that the target wrote in a user's name makes sense as one and is not much like the others."""
    letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in text)
    if not 12 <= len(text) <= 1200 or letters < 0.7 * len(text):
        return False
    found = _word_set(text)
    if len(found) < 3 or len(found) < 0.35 * len(text.split()):
        return False
    return all(len(found & other) < _SAME_WORDS * len(found | other) for other in map(_word_set, others))


def _word_set(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


_BLANKS: Mapping[str, Sequence[str]] = {
    "audience": words.AUDIENCES,
    "style": words.STYLES,
    "name": words.FIRST_NAMES,
    "other": words.FIRST_NAMES,
    "place": words.PLACES,
    "country": words.COUNTRIES,
    "character": words.CHARACTERS,
    "event": words.EVENTS,
    "setting": words.SETTINGS,
    "genre": words.GENRES,
    "language": words.LANGUAGES,
    "code_task": words.CODE_TASKS,
    "word": words.TOPICS,
    "translation": templates.TRANSLATION_LANGUAGES,
    "purpose": templates.EMAIL_PURPOSES,
    "addressee": templates.EMAIL_ADDRESSEES,
    "activity": templates.ACTIVITIES,
    "item": templates.ITEMS,
    "situation": templates.SITUATIONS,
}


@dataclass(frozen=True)
class _Kind:
    """What writes the prompts of a kind, and the material that it takes. Shares are relative to those of the others."""

    share: float
    write: Callable[[PromptWriter, Material], str | tuple[Message, ...]]
    needs: Literal["requests", "passages", "programs", "conversations"] | None = None

    def is_possible(self, material: Material) -> bool:
        return self.needs is None or bool(getattr(material, self.needs))


_KINDS: Mapping[str, _Kind] = {
    "self": _Kind(45, lambda w, m: w.request(m), "requests"),
    "follow_up": _Kind(8, lambda w, m: w.follow_up(m), "conversations"),
    "qa": _Kind(7, lambda w, _: w.task(templates.QUESTIONS)),
    "chat": _Kind(5, lambda w, _: w.task(templates.CHAT)),
    "story": _Kind(7, lambda w, _: w.task(templates.STORIES)),
    "code": _Kind(7, lambda w, _: w.task(templates.CODE)),
    "code_edit": _Kind(4, lambda w, m: w.task_on(templates.CODE_EDITS, m.programs, sentences=99), "programs"),
    "summary": _Kind(8, lambda w, m: w.task_on(templates.SUMMARIES, m.passages), "passages"),
    "rewrite": _Kind(7, lambda w, m: w.task_on(templates.REWRITES, m.passages, sentences=6), "passages"),
    "correction": _Kind(4, lambda w, m: w.correction(m), "passages"),
    "replacement": _Kind(2, lambda w, m: w.replacement(m), "passages"),
    "extraction": _Kind(5, lambda w, m: w.task_on(templates.EXTRACTIONS, m.passages), "passages"),
    "records": _Kind(3, lambda w, _: w.records(templates.RECORD_TASKS)),
    "reading": _Kind(3, lambda w, m: w.task_on(templates.READING, m.passages), "passages"),
    "translation": _Kind(7, lambda w, m: w.sentences(templates.TRANSLATIONS, m), "passages"),
    "classification": _Kind(4, lambda w, m: w.sentences(templates.CLASSIFICATIONS, m), "passages"),
    "howto": _Kind(5, lambda w, _: w.task(templates.HOW_TOS)),
    "list": _Kind(4, lambda w, _: w.task(templates.LISTS)),
    "reasoning": _Kind(6, lambda w, _: w.task(templates.PROBLEMS)),
    "email": _Kind(4, lambda w, _: w.task(templates.EMAILS)),
}
