"""Turns what a client asks for into a request that can run: every limit checked, text tokenised, defaults resolved."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from treeserve_core.errors import InvalidArgumentError, NotFoundError
from treeserve_core.identity import MAX_SESSION_CHARS
from treeserve_core.sampling import (
    SamplingParams,
    SequenceLimits,
    StoppingCriteria,
    check_combination,
    check_token_ids,
)
from treeserve_router.grammar_check import GrammarCheck
from treeserve_text.tokenizer import Tokenizer

MAX_ID_CHARS = 128
MAX_INPUT_BYTES = 1 << 20
MAX_MESSAGES = 1024
ROLES = ("system", "user", "assistant")

# A stand-in for "what the window leaves" until the prompt's length is known; no request can ask for as much.
OPEN_ENDED = 2**32

_T = TypeVar("_T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]*")
# Texts longer than this are tokenised in a thread, so that one long prompt does not hold up every stream.
_INLINE_TEXT_CHARS = 4096


@dataclass(frozen=True)
class Ask:
    """What a client asks for, as either edge understood it.

    Exactly one of prompt, messages, token_ids and resume_offset is set.

    Attributes:
        resume_offset: take up the request of this id where the client has this many output tokens; all but the ids,
            generated_token_ids and deadline is as it was.
        seed_given: the client chose sampling.seed; otherwise one is drawn.
        stopping: with max_tokens = OPEN_ENDED for what the context window leaves.
        deadline: time on the event loop's clock after which nobody waits; None for never.
        traceparent: the caller's W3C trace context; empty for none.
        tenant: whom it is for: a name that the edge vouches for, "" where this router serves one tenant, None if nobody
            is known.
    """

    sampling: SamplingParams
    stopping: StoppingCriteria
    limits: SequenceLimits = field(default_factory=SequenceLimits)
    request_id: str = ""
    model: str = ""
    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    resume_offset: int | None = None
    generated_token_ids: Sequence[int] = ()
    session_id: str = ""
    seed_given: bool = False
    deadline: float | None = None
    traceparent: str = ""
    tenant: str | None = ""


@dataclass(frozen=True)
class RouterRequest:
    """An admitted request: nothing in it is left to be decided.

    Attributes:
        generated_token_ids: output that existed when the request came (a resume).
        delivered: of a request taken up by its id, how many output tokens the client has; None for any other.
        stopping: max_tokens counts generated_token_ids.
        tenant: label of whom it is for (`tenant_label`); empty if nobody is known.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingCriteria
    limits: SequenceLimits
    session_id: str = ""
    deadline: float | None = None
    tenant: str = ""
    delivered: int | None = None

    @property
    def is_taken_up(self) -> bool:
        """Whether some router admitted it before and ran it."""
        return self.delivered is not None

    @property
    def num_delivered(self) -> int:
        """Output tokens that the client has."""
        return len(self.generated_token_ids) if self.delivered is None else self.delivered

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar says what its output may be."""
        return self.sampling.grammar is not None

    @property
    def max_total_tokens(self) -> int:
        """Context window it may fill: prompt and longest output."""
        return len(self.prompt_token_ids) + self.stopping.max_tokens


class Admission:
    """Checks and resolves requests for one model.

    Args:
        tokenizer: the model's.
        model_name: the name it is served under.
        draw_seed: makes a seed in [0, 2^64) for requests that bring none.
        draw_id: makes an id for requests that bring none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_name: str,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        draw_id: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._draw_seed = draw_seed
        self._draw_id = draw_id
        self._grammar_check = GrammarCheck()

    def check(self, ask: Ask) -> None:
        """Check all that needs no context window.

        Raises:
            InvalidArgumentError: naming the field as the public API does.
            NotFoundError: for another model's name.
        """
        _check_ids(ask)
        if ask.model not in ("", self._model_name):
            raise NotFoundError(f"model {ask.model[:MAX_ID_CHARS]!r} is not served here; {self._model_name!r} is")
        _check_input(ask)
        vocab_size = self._tokenizer.vocab_size
        check_token_ids("tokens.token_ids", ask.token_ids or (), vocab_size)
        check_token_ids("generated_token_ids", ask.generated_token_ids, vocab_size)
        ask.sampling.check_vocab(vocab_size)
        ask.stopping.check_vocab(vocab_size)
        check_combination(ask.sampling, ask.limits)
        by_id = ask.resume_offset is not None
        if ask.generated_token_ids and not (by_id or ask.seed_given or ask.sampling.is_greedy):
            raise InvalidArgumentError("sampling.seed", "is required to resume, as Started reported it")

    async def admit(self, ask: Ask, max_context_tokens: int) -> RouterRequest:
        """Resolve a checked request against the context window.

        Args:
            max_context_tokens: longest prompt plus output of any verifier.

        Raises:
            InvalidArgumentError: if the prompt is empty once tokenised, or prompt and output do not fit the window.
        """
        field_name, token_ids = await self._tokenise(ask)
        if not token_ids:
            raise InvalidArgumentError(field_name, "gives no tokens")
        return RouterRequest(
            request_id=ask.request_id or self._draw_id(),
            prompt_token_ids=tuple(token_ids),
            generated_token_ids=tuple(ask.generated_token_ids),
            sampling=ask.sampling if ask.seed_given else replace(ask.sampling, seed=self._draw_seed()),
            stopping=_fit_window(ask, field_name, len(token_ids), max_context_tokens),
            limits=ask.limits,
            session_id=ask.session_id,
            deadline=ask.deadline,
            tenant=label_of(ask),
        )

    async def check_grammar(self, request: RouterRequest) -> None:
        """Check the grammar of a request, if it has one: by itself, because it costs more than all the rest.

        Raises:
            InvalidArgumentError: if it has no meaning.
            OverloadedError: if too many wait to be checked.
        """
        if request.sampling.grammar is not None:
            await self._grammar_check.check(request.sampling.grammar)

    async def _tokenise(self, ask: Ask) -> tuple[str, Sequence[int]]:
        """The input's field name and its token ids."""
        if ask.token_ids is not None:
            return "tokens.token_ids", ask.token_ids
        if ask.messages is not None:
            return "chat.messages", await self._render(ask.messages)
        assert ask.prompt is not None
        return "prompt", await _maybe_in_thread(self._tokenizer.encode, ask.prompt, len(ask.prompt))

    async def _render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        chars = sum(len(message["content"]) for message in messages)
        try:
            return await _maybe_in_thread(self._tokenizer.render_chat, messages, chars)
        except InvalidArgumentError as error:  # the template knows its messages, not the field they came in
            raise InvalidArgumentError("chat.messages", error.reason) from error


def tenant_of(header: str, values: Callable[[str], Sequence[str]]) -> str | None:
    """Whom a request is for.

    Args:
        header: lower-case name of the header that a gateway sets; empty if this router serves one tenant.
        values: the request's values of a header. Two of them are one too many to be the gateway's: nobody is known.
    """
    if not header:
        return ""
    given = values(header)
    return given[0] or None if len(given) == 1 else None


def tenant_label(name: str) -> str:
    """What verifiers and speculators know a tenant by: the same at every router, and no name to read in their logs."""
    return hashlib.sha256(f"treeserve tenant {name}".encode()).hexdigest()[:32]


def label_of(ask: Ask) -> str:
    """The label of whom an ask is for; empty if nobody is known."""
    return "" if ask.tenant is None else tenant_label(ask.tenant)


async def _maybe_in_thread(function: Callable[[_T], list[int]], argument: _T, chars: int) -> list[int]:
    if chars <= _INLINE_TEXT_CHARS:
        return function(argument)
    return await asyncio.to_thread(function, argument)


def _check_ids(ask: Ask) -> None:
    if len(ask.request_id) > MAX_ID_CHARS or not _REQUEST_ID.fullmatch(ask.request_id):
        raise InvalidArgumentError("request_id", f"has at most {MAX_ID_CHARS} characters of [A-Za-z0-9._:-]")
    if len(ask.session_id) > MAX_SESSION_CHARS:
        raise InvalidArgumentError("session_id", f"has at most {MAX_SESSION_CHARS} characters")
    if ask.tenant is not None and len(ask.tenant) > MAX_ID_CHARS:
        raise InvalidArgumentError("tenant", f"has at most {MAX_ID_CHARS} characters")


def _check_input(ask: Ask) -> None:
    given = [what for what in (ask.prompt, ask.messages, ask.token_ids, ask.resume_offset) if what is not None]
    if len(given) != 1:
        raise InvalidArgumentError("input", "exactly one of prompt, chat, tokens and resume is required")
    if ask.resume_offset is not None:
        _check_resume(ask, ask.resume_offset)
    if ask.messages is not None:
        _check_messages(ask.messages)
    if ask.prompt is not None and len(ask.prompt.encode()) > MAX_INPUT_BYTES:
        raise InvalidArgumentError("prompt", f"is longer than {MAX_INPUT_BYTES} bytes")
    if ask.token_ids is not None and len(ask.token_ids) > MAX_INPUT_BYTES:
        raise InvalidArgumentError("tokens.token_ids", f"more than {MAX_INPUT_BYTES} tokens")


def _check_resume(ask: Ask, offset: int) -> None:
    if not ask.request_id:
        raise InvalidArgumentError("request_id", "is required to resume a request by its id")
    if len(ask.generated_token_ids) not in (0, offset):
        raise InvalidArgumentError("generated_token_ids", f"must be none or as many as resume.offset = {offset}")


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidArgumentError("chat.messages", f"must have 1 to {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InvalidArgumentError(f"chat.messages[{i}].role", f"is none of {', '.join(ROLES)}")
    if sum(len(message["content"].encode()) for message in messages) > MAX_INPUT_BYTES:
        raise InvalidArgumentError("chat.messages", f"are longer than {MAX_INPUT_BYTES} bytes together")


def _fit_window(ask: Ask, field_name: str, prompt_tokens: int, max_context_tokens: int) -> StoppingCriteria:
    """The stopping criteria with max_tokens resolved."""
    left = max_context_tokens - prompt_tokens
    if left < 1:
        raise InvalidArgumentError(
            field_name, f"{prompt_tokens} tokens leave no room in a context window of {max_context_tokens}"
        )
    stopping = ask.stopping
    if stopping.max_tokens == OPEN_ENDED:
        stopping = replace(stopping, max_tokens=left)
    if stopping.max_tokens > left:
        raise InvalidArgumentError(
            "stopping.max_tokens",
            f"{prompt_tokens} prompt tokens and {stopping.max_tokens} more exceed the context window of "
            f"{max_context_tokens}",
        )
    if len(ask.generated_token_ids) > stopping.max_tokens:
        raise InvalidArgumentError("generated_token_ids", f"more than max_tokens = {stopping.max_tokens}")
    return stopping
