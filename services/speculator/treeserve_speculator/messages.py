"""The verifier's draft messages as the drafter's types; nothing behind this file knows protobuf."""

from __future__ import annotations

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.identity import check_tenant
from treeserve_core.preset import Preset
from treeserve_core.sampling import check_token_ids
from treeserve_speculator.sequence import CommittedTokens, DraftSequence
from treeserve_wire.codec import acceptance_rule_from_proto, sampling_from_proto


def sequence_from_proto(msg: verifier_pb2.Assignment, vocab_size: int) -> DraftSequence:
    """A new sequence. Raises InvalidArgumentError if it cannot be drafted for."""
    if not msg.token_ids:
        raise InvalidArgumentError("token_ids", "is empty")
    if not 0 <= msg.prompt_tokens <= len(msg.token_ids):
        raise InvalidArgumentError("prompt_tokens", f"{msg.prompt_tokens} of {len(msg.token_ids)} tokens")
    check_token_ids("token_ids", msg.token_ids, vocab_size)
    check_tenant(msg.tenant)
    return DraftSequence(
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


def committed_from_proto(msg: verifier_pb2.Commit, vocab_size: int) -> CommittedTokens:
    """Progress of a sequence. Raises InvalidArgumentError for a token id outside the vocabulary."""
    check_token_ids("token_ids", msg.token_ids, vocab_size)
    return CommittedTokens(
        handle=msg.handle,
        base_committed_len=msg.base_committed_len,
        token_ids=tuple(msg.token_ids),
        budget=msg.budget,
        top_tokens=tuple(tuple(top.token_ids) for top in msg.top_tokens),
    )
