"""Protobuf messages to core types and back: requests, limits, identities and answers.

Floats travel as 32-bit, so a value such as 0.7 is 0.699999988 to every peer that decodes it; decoding and encoding
again changes nothing more. Range checks are those of the core types; sizes are checked before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterable

from treeserve.common.v1 import common_pb2
from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.identity import ModelIdentity
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_core.preset import Preset
from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria
from treeserve_wire.grammar_codec import grammar_from_proto, grammar_to_proto


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParameters:
    """Encode sampling parameters, seed included."""
    return common_pb2.SamplingParameters(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        top_log_probs=params.top_log_probs,
        grammar=None if params.grammar is None else grammar_to_proto(params.grammar),
    )


def sampling_from_proto(msg: common_pb2.SamplingParameters) -> SamplingParams:
    """Decode sampling parameters; an unset seed is 0.

    Raises:
        InvalidArgumentError: for a value outside the limits that the public API states.
    """
    return SamplingParams(
        temperature=msg.temperature,
        top_k=msg.top_k,
        top_p=msg.top_p if msg.HasField("top_p") else 1.0,
        min_p=msg.min_p,
        repetition_penalty=msg.repetition_penalty if msg.HasField("repetition_penalty") else 1.0,
        presence_penalty=msg.presence_penalty,
        frequency_penalty=msg.frequency_penalty,
        logit_bias=dict(msg.logit_bias),
        seed=msg.seed,
        top_log_probs=msg.top_log_probs if msg.HasField("top_log_probs") else None,
        grammar=grammar_from_proto(msg.grammar) if msg.HasField("grammar") else None,
    )


def stopping_to_proto(stopping: StoppingCriteria) -> common_pb2.StoppingCriteria:
    """Encode stopping criteria."""
    return common_pb2.StoppingCriteria(
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        stop_strings=stopping.stop_strings,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
    )


def stopping_from_proto(msg: common_pb2.StoppingCriteria, max_tokens_default: int) -> StoppingCriteria:
    """Decode stopping criteria; `max_tokens_default` (what the context window leaves) stands in for 0.

    Raises:
        InvalidArgumentError: for a value outside the limits that the public API states.
    """
    return StoppingCriteria(
        max_tokens=msg.max_tokens or max_tokens_default,
        min_tokens=msg.min_tokens,
        stop_strings=tuple(msg.stop_strings),
        stop_token_ids=tuple(msg.stop_token_ids),
        ignore_eos=msg.ignore_eos,
    )


def limits_to_proto(limits: SequenceLimits) -> tuple[common_pb2.SpeculationOptions, common_pb2.ServiceLevel]:
    """Encode a sequence's limits."""
    acceptance = limits.acceptance
    is_typical = acceptance.rule is AcceptanceRule.TYPICAL
    speculation = common_pb2.SpeculationOptions(
        disabled=not limits.speculates,
        max_nodes=limits.max_nodes or 0,
        acceptance=acceptance_rule_to_proto(acceptance.rule),
        typical_epsilon=acceptance.epsilon if is_typical else None,
        typical_delta=acceptance.delta if is_typical else None,
        preset=limits.preset,
    )
    service_level = common_pb2.ServiceLevel(
        service_class=common_pb2.ServiceClass.ValueType(limits.service_class),
        ttft_ms=limits.ttft_ms or 0.0,
        tpot_ms=limits.tpot_ms or 0.0,
    )
    return speculation, service_level


def limits_from_proto(
    speculation: common_pb2.SpeculationOptions, service_level: common_pb2.ServiceLevel
) -> SequenceLimits:
    """Decode speculation bounds and promises; an unset class is STANDARD, an unset target is no target.

    Raises:
        InvalidArgumentError: for an unknown service class, acceptance rule or preset, or a value outside its limits.
    """
    try:
        service_class = ServiceClass(service_level.service_class or ServiceClass.STANDARD)
    except ValueError:
        raise InvalidArgumentError("service_level.service_class", f"{service_level.service_class} is unknown") from None
    return SequenceLimits(
        service_class=service_class,
        max_nodes=0 if speculation.disabled else speculation.max_nodes or None,
        ttft_ms=service_level.ttft_ms or None,
        tpot_ms=service_level.tpot_ms or None,
        acceptance=Acceptance.of(
            acceptance_rule_from_proto(speculation.acceptance),
            speculation.typical_epsilon if speculation.HasField("typical_epsilon") else None,
            speculation.typical_delta if speculation.HasField("typical_delta") else None,
        ),
        preset=Preset.of(speculation.preset),
    )


def acceptance_rule_to_proto(rule: AcceptanceRule) -> common_pb2.AcceptanceRule.ValueType:
    """Encode an acceptance rule."""
    return common_pb2.AcceptanceRule.ValueType(rule)


def acceptance_rule_from_proto(value: common_pb2.AcceptanceRule.ValueType) -> AcceptanceRule:
    """Decode an acceptance rule; unspecified is REPLAY. Raises InvalidArgumentError for an unknown one."""
    try:
        return AcceptanceRule(value) if value else AcceptanceRule.REPLAY
    except ValueError:
        raise InvalidArgumentError("speculation.acceptance", f"{value} is unknown") from None


def known_acceptance_rules(values: Iterable[common_pb2.AcceptanceRule.ValueType]) -> frozenset[AcceptanceRule]:
    """The rules of a peer's hello or welcome that this side knows too; REPLAY is always among them."""
    known = {int(value) for value in values}
    return frozenset({AcceptanceRule.REPLAY, *(rule for rule in AcceptanceRule if rule in known)})


def identity_to_proto(identity: ModelIdentity) -> common_pb2.ModelIdentity:
    """Encode a model's identity."""
    return common_pb2.ModelIdentity(
        name=identity.name,
        tokenizer_hash=identity.tokenizer_hash,
        vocab_size=identity.vocab_size,
        eos_token_ids=identity.eos_token_ids,
        padded_vocab_size=identity.padded_vocab_size,
    )


def identity_from_proto(msg: common_pb2.ModelIdentity) -> ModelIdentity:
    """Decode a model's identity."""
    return ModelIdentity(
        name=msg.name,
        tokenizer_hash=msg.tokenizer_hash,
        vocab_size=msg.vocab_size,
        padded_vocab_size=msg.padded_vocab_size,
        eos_token_ids=tuple(msg.eos_token_ids),
    )


def log_probs_to_proto(positions: Iterable[PositionLogProbs]) -> list[common_pb2.PositionLogProbs]:
    """Encode the log-probabilities of consecutive positions."""
    return [
        common_pb2.PositionLogProbs(
            chosen=common_pb2.TokenLogProb(token_id=position.token_id, log_prob=position.log_prob),
            top=[common_pb2.TokenLogProb(token_id=token_id, log_prob=value) for token_id, value in position.top],
        )
        for position in positions
    ]


def log_probs_from_proto(messages: Iterable[common_pb2.PositionLogProbs]) -> tuple[PositionLogProbs, ...]:
    """Decode the log-probabilities of consecutive positions."""
    return tuple(
        PositionLogProbs(
            token_id=msg.chosen.token_id,
            log_prob=msg.chosen.log_prob,
            top=tuple((entry.token_id, entry.log_prob) for entry in msg.top),
        )
        for msg in messages
    )


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    """Encode a finish reason."""
    return common_pb2.FinishReason.ValueType(reason)


def finish_reason_from_proto(value: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Decode a finish reason; unspecified is None. Raises InvalidArgumentError for an unknown one."""
    try:
        return FinishReason(value) if value else None
    except ValueError:
        raise InvalidArgumentError("reason", f"{value} is unknown") from None


def stats_to_proto(stats: SpeculationStats) -> common_pb2.SpeculationStats:
    """Encode speculation counts."""
    return common_pb2.SpeculationStats(
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_depth=stats.accepted_per_depth,
        acceptance=acceptance_rule_to_proto(stats.acceptance),
        lossy=stats.acceptance.is_lossy,
    )


def stats_from_proto(msg: common_pb2.SpeculationStats) -> SpeculationStats:
    """Decode speculation counts. Raises InvalidArgumentError for an unknown acceptance rule."""
    return SpeculationStats(
        steps=msg.steps,
        drafted=msg.drafted,
        accepted=msg.accepted,
        accepted_per_depth=list(msg.accepted_per_depth),
        acceptance=acceptance_rule_from_proto(msg.acceptance),
    )
