"""The OpenAI-compatible requests: what is understood, what is refused, and the ask they stand for.

Whatever is not listed here is refused by name: a parameter that is silently ignored gives wrong output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar
from treeserve_core.preset import Preset
from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria
from treeserve_router.admission import OPEN_ENDED, Ask
from treeserve_router.openai_grammar import ResponseFormat, StructuredOutputs
from treeserve_router.openai_strict import Strict

# One spelling only: two for the same token would silently drop one bias.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
# The completions API's own default; the chat API's is what the context window leaves.
_DEFAULT_COMPLETION_TOKENS = 16
# OpenAI's names for service classes; the others leave the class to whoever is asked.
_TIERS = {"auto": None, "default": None, "flex": ServiceClass.BATCH, "priority": ServiceClass.INTERACTIVE}
_Tokens = Annotated[int, Field(lt=2**32)]


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool = False


class Speculation(Strict):
    """Extension: the switch and bound of speculation, how drafted tokens are accepted, and what kind of work it is.

    Only `replay` is bit-identical with `enabled: false`; `multi_step` keeps the distribution, `typical` is lossy.
    """

    enabled: bool = True
    max_nodes: Annotated[int, Field(ge=0, lt=2**32)] = 0
    acceptance: Literal["replay", "multi_step", "typical"] = "replay"
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    preset: str = ""

    def to_acceptance(self) -> Acceptance:
        """The rule and its parameters. Raises InvalidArgumentError for a value outside its limits."""
        return Acceptance.of(AcceptanceRule[self.acceptance.upper()], self.typical_epsilon, self.typical_delta)


class GenerationOptions(Strict):
    """What both endpoints share. Fields after `user` are extensions."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    user: str = ""  # a label by its definition: it changes nothing
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    session_id: str = ""
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    service_class: Literal["realtime", "interactive", "standard", "batch"] | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    speculation: Speculation = Speculation()
    structured_outputs: StructuredOutputs | None = None

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Read a request from decoded JSON.

        Raises:
            InvalidArgumentError: naming the first parameter that is unknown or of the wrong type.
        """
        if not isinstance(body, dict):
            raise InvalidArgumentError("body", "must be a JSON object")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _invalid_argument(error) from None

    def _sampling(self, top_log_probs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_bias_id(token_id): bias for token_id, bias in self.logit_bias.items()},
            seed=self.seed or 0,
            top_log_probs=top_log_probs,
            grammar=self._grammar(),
        )

    def named(self, error: Exception) -> Exception:
        """The error, with the client's own name for its grammar and its token ids."""
        if not isinstance(error, InvalidArgumentError):
            return error
        if error.field.startswith("sampling.grammar"):
            return InvalidArgumentError(self._grammar_param, error.reason)
        return InvalidArgumentError("prompt", error.reason) if error.field == "tokens.token_ids" else error

    @property
    def _grammar_param(self) -> str:
        return "structured_outputs" if self.structured_outputs is None else self.structured_outputs.param

    def _grammar(self) -> Grammar | None:
        return None if self.structured_outputs is None else self.structured_outputs.to_grammar()

    def _stopping(self, max_tokens: int) -> StoppingCriteria:
        return StoppingCriteria(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    @property
    def class_given(self) -> bool:
        """Whether the client chose a service class."""
        return self._asked_class is not None

    @property
    def _asked_class(self) -> ServiceClass | None:
        by_tier = _TIERS[self.service_tier]
        by_name = None if self.service_class is None else ServiceClass[self.service_class.upper()]
        if by_name is not None and by_tier is not None and by_name != by_tier:
            raise InvalidArgumentError("service_tier", "contradicts service_class")
        return by_tier if by_name is None else by_name

    def _limits(self) -> SequenceLimits:
        max_nodes = (self.speculation.max_nodes or None) if self.speculation.enabled else 0
        return SequenceLimits(
            service_class=self._asked_class or ServiceClass.STANDARD,
            max_nodes=max_nodes,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            acceptance=self.speculation.to_acceptance(),
            preset=Preset.of(self.speculation.preset),
        )


class CompletionRequest(GenerationOptions):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str]
    max_tokens: _Tokens = _DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    def to_ask(self, traceparent: str) -> Ask:
        """The ask it stands for. Raises InvalidArgumentError for a value outside its limits."""
        prompt = self.prompt
        if isinstance(prompt, list) and any(isinstance(part, str) for part in prompt):
            if len(prompt) != 1:
                raise InvalidArgumentError("prompt", "several prompts in one request are not supported")
            prompt = str(prompt[0])
        return Ask(
            sampling=self._sampling(self.logprobs),
            stopping=self._stopping(self.max_tokens),
            limits=self._limits(),
            model=self.model,
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None
            if isinstance(prompt, str)
            else [token_id for token_id in prompt if isinstance(token_id, int)],
            session_id=self.session_id,
            seed_given=self.seed is not None,
            traceparent=traceparent,
        )


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationOptions):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat = ResponseFormat()

    def to_ask(self, traceparent: str) -> Ask:
        """The ask it stands for. Raises InvalidArgumentError for a value outside its limits."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgumentError("top_logprobs", "requires logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidArgumentError("max_tokens", "contradicts max_completion_tokens")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return Ask(
            sampling=self._sampling((self.top_logprobs or 0) if self.logprobs else None),
            stopping=self._stopping(OPEN_ENDED if max_tokens is None else max_tokens),
            limits=self._limits(),
            model=self.model,
            messages=[{"role": message.role, "content": message.text} for message in self.messages],
            session_id=self.session_id,
            seed_given=self.seed is not None,
            traceparent=traceparent,
        )

    def _grammar(self) -> Grammar | None:
        by_format, by_extension = self.response_format.to_grammar(), super()._grammar()
        if by_format is not None and by_extension is not None:
            raise InvalidArgumentError("response_format", "contradicts structured_outputs")
        return by_format or by_extension

    @property
    def _grammar_param(self) -> str:
        return self.response_format.param if self.structured_outputs is None else super()._grammar_param


def _invalid_argument(error: ValidationError) -> InvalidArgumentError:
    """The first fault; of a value that may be of several types, what is wrong by the one that got furthest.

    A null comes after others: it may only go with one, as the content of a message that calls tools.
    """
    fault = max(error.errors(), key=lambda each: (len(_path(each["loc"])), each["input"] is not None))
    if fault["type"] == "extra_forbidden":
        reason = "is not supported"
    else:
        reason = "must not be null" if fault["input"] is None else fault["msg"]
    return InvalidArgumentError(_place(fault["loc"]), reason)


def _place(parts: Iterable[int | str]) -> str:
    """As `messages[0].content`."""
    text = ""
    for part in _path(parts):
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _path(parts: Iterable[int | str]) -> list[int | str]:
    """Without types: of several that a value may be of, pydantic names the one it tried."""
    return [part for part in parts if isinstance(part, int) or (part != "str" and "[" not in part)]


def _bias_id(text: str) -> int:
    if not _TOKEN_ID.fullmatch(text):
        raise InvalidArgumentError("logit_bias", f"{text[:20]!r} is not a token id")
    return int(text)
