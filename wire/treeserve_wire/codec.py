"""Protobuf messages to core types and back: the one place where both are known.

Floats travel as 32-bit, so a value such as 0.7 is 0.699999988 to every peer that decodes it; decoding and encoding
again changes nothing more. Range checks are those of the core types; sizes are checked before anything is built.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.draws import MAX_DRAWS, MAX_SUPPORT, Draws
from treeserve_core.errors import InvalidArgumentError, InvalidTreeError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.identity import ModelIdentity
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_core.preset import Preset
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria, check_token_ids
from treeserve_core.tree import TokenTree
from treeserve_wire.grammar_codec import grammar_from_proto, grammar_to_proto

_T = TypeVar("_T")

_FEATURES = np.dtype("<f2")


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


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """Encode a finish reason; None is unspecified."""
    return common_pb2.FinishReason.ValueType(reason or common_pb2.FINISH_REASON_UNSPECIFIED)


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


def proposal_to_proto(handle: int, proposal: DraftProposal) -> verifier_pb2.TreeProposal:
    """Encode a drafter's proposal for the sequence `handle`."""
    tree = proposal.tree
    return verifier_pb2.TreeProposal(
        handle=handle,
        base_committed_len=proposal.base_committed_len,
        token_ids=tree.token_ids,
        parents=tree.parents,
        log_probs=tree.log_probs or (),
        source_masks=tree.source_masks or (),
        draft_us=proposal.draft_us,
        draws=[
            verifier_pb2.NodeDraws(node=i, token_ids=draws.token_ids, support=draws.support, weights=draws.weights)
            for i, draws in enumerate(tree.draws or ())
            if draws is not None
        ],
    )


def proposal_from_proto(
    msg: verifier_pb2.TreeProposal, *, vocab_size: int, max_nodes: int, max_depth: int, num_sources: int
) -> DraftProposal:
    """Decode a drafter's proposal, trusting nothing in it.

    Args:
        vocab_size: token ids the tokenizer knows.
        max_nodes: most nodes, the root included.
        max_depth: deepest node allowed; the root has depth 0.
        num_sources: sources the speculator named in its hello.

    Raises:
        InvalidTreeError: for a tree that is too large or too deep, or breaks an invariant of `TokenTree`.
        InvalidArgumentError: for a token id outside the vocabulary or an impossible base.
    """
    _check_proposal_sizes(msg, max_nodes)
    if msg.base_committed_len < 1:
        raise InvalidArgumentError("base_committed_len", "must be at least 1")
    check_token_ids("token_ids", msg.token_ids, vocab_size)
    if msg.source_masks and max(msg.source_masks) >> num_sources:
        raise InvalidTreeError(f"a source mask names a source beyond the {num_sources} of the hello")
    tree = TokenTree(
        tuple(msg.token_ids),
        tuple(msg.parents),
        _tuple_or_none(msg.log_probs),
        _tuple_or_none(msg.source_masks),
        _draws_from_proto(msg, vocab_size),
    )
    if max(tree.depths) > max_depth:
        raise InvalidTreeError(f"depth {max(tree.depths)} is beyond the limit of {max_depth}")
    return DraftProposal(msg.base_committed_len, tree, msg.draft_us)


def feature_shape_to_proto(shape: FeatureShape) -> verifier_pb2.FeatureShape:
    """Encode what a token's features hold."""
    return verifier_pb2.FeatureShape(layers=shape.layers, hidden_size=shape.hidden_size)


def feature_shape_from_proto(msg: verifier_pb2.FeatureShape) -> FeatureShape:
    """Decode what a token's features hold; any numbers: it is only ever compared."""
    return FeatureShape(tuple(msg.layers), msg.hidden_size)


def features_to_proto(rows: FeatureRows) -> verifier_pb2.Features:
    """Encode features."""
    tokens, layers, hidden_size = rows.values.shape
    values = rows.values.astype(_FEATURES).tobytes()
    return verifier_pb2.Features(
        first_token=rows.first,
        tokens=tokens,
        layers=layers,
        hidden_size=hidden_size,
        dtype=_FEATURES.name,
        values=values,
        crc32=zlib.crc32(values),
    )


def features_from_proto(msg: verifier_pb2.Features, shape: FeatureShape) -> FeatureRows:
    """Decode features.

    Args:
        shape: what they must be.

    Raises:
        InvalidArgumentError: if they are of another shape or type, incomplete, damaged or not finite.
    """
    if (msg.layers, msg.hidden_size) != shape.row_shape or msg.dtype != _FEATURES.name:
        found = f"{msg.dtype}[{msg.layers}, {msg.hidden_size}]"
        raise InvalidArgumentError("features", f"{found} instead of {_FEATURES.name}{list(shape.row_shape)}")
    if not msg.tokens or len(msg.values) != msg.tokens * shape.row_bytes:
        raise InvalidArgumentError("features", f"{len(msg.values)} bytes for {msg.tokens} tokens")
    if zlib.crc32(msg.values) != msg.crc32:
        raise InvalidArgumentError("features", "the checksum does not match")
    values = np.frombuffer(msg.values, _FEATURES).reshape(msg.tokens, *shape.row_shape)
    if not np.isfinite(values).all():
        raise InvalidArgumentError("features", "a number is not finite")
    return FeatureRows(msg.first_token, values)


def _draws_from_proto(msg: verifier_pb2.TreeProposal, vocab_size: int) -> tuple[Draws | None, ...] | None:
    if not msg.draws:
        return None
    draws: list[Draws | None] = [None] * len(msg.token_ids)
    for entry in msg.draws:
        if entry.node >= len(draws) or draws[entry.node] is not None:
            raise InvalidTreeError(f"draws for node {entry.node}, which is not there or has some already")
        check_token_ids("draws.support", entry.support, vocab_size)
        draws[entry.node] = Draws(tuple(entry.token_ids), tuple(entry.support), tuple(entry.weights))
    return tuple(draws)


def _check_proposal_sizes(msg: verifier_pb2.TreeProposal, max_nodes: int) -> None:
    nodes = len(msg.token_ids)
    if not 1 <= nodes <= max_nodes:
        raise InvalidTreeError(f"{nodes} nodes are outside [1, {max_nodes}]")
    if len(msg.parents) != nodes:
        raise InvalidTreeError(f"{nodes} tokens but {len(msg.parents)} parents")
    if len(msg.log_probs) not in (0, nodes):
        raise InvalidTreeError(f"{nodes} tokens but {len(msg.log_probs)} log-probabilities")
    if len(msg.source_masks) not in (0, nodes):
        raise InvalidTreeError(f"{nodes} tokens but {len(msg.source_masks)} source masks")
    if len(msg.draws) > nodes:
        raise InvalidTreeError(f"{nodes} tokens but draws for {len(msg.draws)}")
    for draws in msg.draws:
        if max(len(draws.support), len(draws.weights)) > MAX_SUPPORT or len(draws.token_ids) > MAX_DRAWS:
            raise InvalidTreeError(f"node {draws.node} has more than {MAX_DRAWS} draws or {MAX_SUPPORT} ids to draw")


def _tuple_or_none(values: Sequence[_T]) -> tuple[_T, ...] | None:
    return tuple(values) or None
