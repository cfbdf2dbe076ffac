"""The verifier's draft messages as the drafter's types; nothing behind this file knows protobuf."""

from __future__ import annotations

import math
from collections.abc import Iterable

import structlog

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.identity import check_tenant
from treeserve_core.preset import Preset
from treeserve_core.sampling import check_token_ids
from treeserve_speculator.sequence import CommittedTokens, DraftPrices, DraftSequence
from treeserve_wire.codec import acceptance_rule_from_proto, sampling_from_proto
from treeserve_wire.draft_codec import features_from_proto

_log = structlog.get_logger(__name__)


def sequence_from_proto(
    msg: verifier_pb2.Assignment, vocab_size: int, feature_shape: FeatureShape | None = None
) -> DraftSequence:
    """A new sequence. Raises InvalidArgumentError if it cannot be drafted for.

    Args:
        feature_shape: of the features that were asked for, if any were.
    """
    if not msg.token_ids:
        raise InvalidArgumentError("token_ids", "is empty")
    if not 0 <= msg.prompt_tokens <= len(msg.token_ids):
        raise InvalidArgumentError("prompt_tokens", f"{msg.prompt_tokens} of {len(msg.token_ids)} tokens")
    check_token_ids("token_ids", msg.token_ids, vocab_size)
    check_tenant(msg.tenant)
    sequence = DraftSequence(
        handle=msg.handle,
        tokens=list(msg.token_ids),
        prompt_len=msg.prompt_tokens,
        sampling=sampling_from_proto(msg.sampling),
        budget=msg.budget,
        traceparent=msg.traceparent,
        acceptance=acceptance_rule_from_proto(msg.acceptance),
        tenant=msg.tenant,
        # A newer verifier may know more of them: then the sequence begins as one that said nothing.
        preset=next((preset for preset in Preset if preset == msg.preset), Preset.NONE),
    )
    sequence.take_features(_features(msg.features, feature_shape))
    return sequence


def committed_from_proto(
    msg: verifier_pb2.Commit, vocab_size: int, feature_shape: FeatureShape | None = None
) -> CommittedTokens:
    """Progress of a sequence. Raises InvalidArgumentError for a token id outside the vocabulary.

    Args:
        feature_shape: of the features that were asked for, if any were.
    """
    check_token_ids("token_ids", msg.token_ids, vocab_size)
    return CommittedTokens(
        handle=msg.handle,
        base_committed_len=msg.base_committed_len,
        token_ids=tuple(msg.token_ids),
        budget=msg.budget,
        top_tokens=tuple(tuple(top.token_ids) for top in msg.top_tokens),
        features=_features(msg.features, feature_shape),
    )


def _features(blocks: Iterable[verifier_pb2.Features], shape: FeatureShape | None) -> tuple[FeatureRows, ...] | None:
    """What was asked for; None if some of it is damaged, which costs the sequence no more than these."""
    if shape is None:
        return ()
    try:
        return tuple(features_from_proto(block, shape) for block in blocks)
    except InvalidArgumentError as error:
        _log.error("damaged features", reason=str(error))
        return None


def prices_from_proto(msg: verifier_pb2.DraftPrices) -> DraftPrices:
    """What the verifier pays. Raises InvalidArgumentError for what is no price."""
    for name in ("token_us", "node"):
        if not 0.0 <= getattr(msg, name) < math.inf:  # also catches NaN
            raise InvalidArgumentError(f"prices.{name}", "is not a number of at least 0")
    return DraftPrices(token_us=msg.token_us, node=msg.node)
