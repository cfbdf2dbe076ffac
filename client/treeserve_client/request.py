"""The parameters of a generation and the message they become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from google.protobuf.message import Message

from treeserve.common.v1 import common_pb2
from treeserve.inference.v1 import inference_pb2
from treeserve_client.errors import InvalidArgument
from treeserve_client.types import AcceptanceRule

ServiceClass = Literal["realtime", "interactive", "standard", "batch"]
Preset = Literal["code", "chat", "summary", "translation", "creative"]


class GenerateParams(TypedDict, total=False):
    """Parameters of `generate` and `complete`. Exactly one of prompt, messages and token_ids; None means unset.

    Defaults are the API's: greedy, no filters, no penalties, as many tokens as the context window leaves, standard
    service class.
    """

    prompt: str | None
    """Text to continue."""
    messages: Sequence[Mapping[str, str]] | None
    """A conversation: mappings with "role" and "content", rendered with the model's chat template."""
    token_ids: Sequence[int] | None
    """A prompt that is tokenised already."""
    model: str | None
    """Served model name; unset means the only one."""
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    """The text ends before the first of these."""
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    """Unset: the router draws one; `Stream.started` tells it."""
    top_log_probs: int | None
    """Return log-probabilities: the chosen token's and this many most probable ones."""
    json_schema: str | Mapping[str, Any] | None
    """The output is JSON that is valid under this schema. At most one of this and the next four."""
    json_object: bool
    """The output is a JSON object."""
    regex: str | None
    """The output is what this regular expression matches as a whole."""
    choice: Sequence[str] | None
    """The output is one of these texts."""
    lark: str | None
    """The output is a text of this grammar, in llguidance's Lark notation."""
    speculation: bool
    """False decodes plainly. The tokens are the same."""
    max_nodes: int | None
    """Draft at most this many nodes a step."""
    acceptance: AcceptanceRule | None
    """How drafted tokens are accepted. Only "replay", the default, gives the tokens of `speculation=False`;
    "multi_step" keeps their distribution, "typical" is lossy."""
    typical_epsilon: float | None
    typical_delta: float | None
    """Of "typical": a drafted token passes if its probability exceeds min(epsilon, delta * exp(-entropy))."""
    preset: Preset | None
    """What kind of work it is: drafting begins with what usually suits that. The tokens are the same."""
    service_class: ServiceClass | None
    ttft_ms: float | None
    """Target for the time to the first token."""
    tpot_ms: float | None
    """Target for the time per output token."""
    session_id: str | None
    """Conversation the request belongs to."""
    request_id: str | None


def build_request(params: GenerateParams) -> inference_pb2.GenerateRequest:
    """The message of a request.

    Raises:
        InvalidArgument: if not exactly one input is given, or a value does not fit its field at all.
        TypeError: for an unknown parameter or a value of the wrong type.
    """
    given: dict[str, Any] = {name: value for name, value in params.items() if value is not None}
    unknown = sorted(given.keys() - GenerateParams.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown parameters: {', '.join(unknown)}")
    try:
        return inference_pb2.GenerateRequest(
            **_input(given),
            request_id=given.get("request_id", ""),
            model=given.get("model", ""),
            session_id=given.get("session_id", ""),
            sampling=common_pb2.SamplingParameters(
                **_fields_of(common_pb2.SamplingParameters, given), grammar=_grammar(given)
            ),
            stopping=common_pb2.StoppingCriteria(
                **_fields_of(common_pb2.StoppingCriteria, given), stop_strings=_strings(given.get("stop", ()))
            ),
            speculation=common_pb2.SpeculationOptions(
                disabled=not given.get("speculation", True),
                max_nodes=given.get("max_nodes", 0),
                acceptance=_acceptance_rule(given.get("acceptance", "unspecified")),
                typical_epsilon=given.get("typical_epsilon"),
                typical_delta=given.get("typical_delta"),
                preset=given.get("preset", ""),
            ),
            service_level=common_pb2.ServiceLevel(
                service_class=_service_class(given.get("service_class", "unspecified")),
                ttft_ms=given.get("ttft_ms", 0.0),
                tpot_ms=given.get("tpot_ms", 0.0),
            ),
        )
    except ValueError as error:  # from protobuf: a number outside its field's type
        raise InvalidArgument.of(_out_of_range(given), str(error)) from error


def _input(given: Mapping[str, Any]) -> dict[str, Any]:
    inputs = [name for name in ("prompt", "messages", "token_ids") if name in given]
    if len(inputs) != 1:
        raise InvalidArgument.of("input", f"exactly one of prompt, messages and token_ids is needed, not {len(inputs)}")
    if "messages" in given:
        messages = [_message(f"messages[{i}]", message) for i, message in enumerate(given["messages"])]
        return {"chat": inference_pb2.ChatInput(messages=messages)}
    if "token_ids" in given:
        return {"tokens": inference_pb2.TokenInput(token_ids=given["token_ids"])}
    return {"prompt": given["prompt"]}


def _message(place: str, message: Mapping[str, str]) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise TypeError(f"{place}: a role and a content are expected, not {message!r}")
    for name in ("role", "content"):
        if message.get(name) is None:
            raise InvalidArgument.of(f"{place}.{name}", "must not be None" if name in message else "is missing")
    return inference_pb2.ChatMessage(**message)


def _out_of_range(given: Mapping[str, Any]) -> str:
    """The first parameter whose number its field cannot hold."""
    groups = (
        common_pb2.SamplingParameters,
        common_pb2.StoppingCriteria,
        common_pb2.SpeculationOptions,
        common_pb2.ServiceLevel,
        inference_pb2.TokenInput,
    )
    for group in groups:
        for name, value in _fields_of(group, given).items():
            try:
                group(**{name: value})
            except (TypeError, ValueError):
                return name
    return "input"


def _grammar(given: Mapping[str, Any]) -> common_pb2.Grammar | None:
    kinds = common_pb2.Grammar.DESCRIPTOR.oneofs_by_name["kind"].fields
    names = [kind.name for kind in kinds if given.get(kind.name, False) is not False]
    if len(names) > 1:
        raise InvalidArgument.of("sampling.grammar", f"is one of {' and '.join(names)}, not several")
    if not names:
        return None
    (name,) = names
    value = given[name]
    if name == "choice":
        value = common_pb2.Choice(texts=_strings(value))
    elif name == "json_schema" and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    return common_pb2.Grammar(**{name: value})


def _fields_of(message: type[Message], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that carry the names of the message's own fields."""
    return {name: value for name, value in given.items() if name in message.DESCRIPTOR.fields_by_name}


def _strings(stop: str | Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop


def _acceptance_rule(name: str) -> common_pb2.AcceptanceRule.ValueType:
    try:
        return common_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{name.upper()}")
    except ValueError:
        raise InvalidArgument.of("speculation.acceptance", f"{name!r} is unknown") from None


def _service_class(name: str) -> common_pb2.ServiceClass.ValueType:
    try:
        return common_pb2.ServiceClass.Value(f"SERVICE_CLASS_{name.upper()}")
    except ValueError:
        raise InvalidArgument.of("service_level.service_class", f"{name!r} is unknown") from None
