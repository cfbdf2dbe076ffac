"""Long conversations of two turns, made of the prompts' texts: none begins like another."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.tasks import Conversation
from treeserve_text.tokenizer import Tokenizer

Message = Mapping[str, str]
_ROLES = ("user", "assistant")
_CLOSING = ({"role": "assistant", "content": "I see."},)
_QUESTIONS = (
    "Which of all this matters most, and why?",
    "Put what we have said so far into two sentences.",
    "What would you ask next?",
    "Name three words that sum this up.",
)


@dataclass(frozen=True)
class TwoTurns:
    """A conversation with two more questions to come.

    Attributes:
        history: what was said before, which with the first question is `tokens` long.
        questions: the user's next messages.
    """

    history: tuple[Message, ...]
    questions: tuple[str, str]

    def first(self) -> list[Message]:
        """The messages of the first turn."""
        return [*self.history, {"role": "user", "content": self.questions[0]}]

    def second(self, answer: str) -> list[Message]:
        """The messages of the second turn, after this answer to the first."""
        asked = {"role": "user", "content": self.questions[1]}
        return [*self.first(), {"role": "assistant", "content": answer}, asked]


def make_conversations(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, history_tokens: int, rng: random.Random
) -> list[TwoTurns]:
    """Conversations whose first turn has `history_tokens` tokens, give or take a few.

    Each begins with a text of its own, so that none shares more than the template's first words with another.

    Raises:
        ValueError: if there are fewer texts than conversations, or too little text.
    """
    if count > len(texts):
        raise ValueError(f"{count} conversations, but only {len(texts)} texts")
    openings = rng.sample(texts, count)
    return [
        _conversation([opening, *rng.sample(texts, len(texts))], tokenizer, history_tokens, rng) for opening in openings
    ]


def _conversation(texts: Sequence[str], tokenizer: Tokenizer, tokens: int, rng: random.Random) -> TwoTurns:
    """Users and assistants say one text after the other, the last one as far as it fits."""
    first, second = rng.sample(_QUESTIONS, 2)

    def with_history(said: Sequence[str]) -> TwoTurns:
        messages = [{"role": _ROLES[i % 2], "content": text} for i, text in enumerate(said)]
        return TwoTurns((*messages, *(_CLOSING if len(messages) % 2 else ())), (first, second))

    said: list[str] = []
    for text in texts:
        excess = len(tokenizer.render_chat(with_history([*said, text]).first())) - tokens
        if excess >= 0:
            token_ids = tokenizer.encode(text)
            kept = token_ids[: max(1, len(token_ids) - excess)]
            return with_history([*said, tokenizer.decode(kept).strip()])
        said.append(text)
    raise ValueError(f"the texts have fewer than {tokens} tokens together")


def all_texts(conversations: Mapping[str, Sequence[Conversation]]) -> list[str]:
    """The users' messages, each once."""
    return list(dict.fromkeys(message["content"] for ours in conversations.values() for c in ours for message in c))
