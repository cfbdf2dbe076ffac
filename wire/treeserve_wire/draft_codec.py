"""Protobuf messages of the Draft stream to core types and back: trees with their claims and draws, hidden features.

Sizes are checked before anything is built; the other checks are those of the core types.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.draws import MAX_DRAWS, MAX_SUPPORT, Draws
from treeserve_core.errors import InvalidArgumentError, InvalidTreeError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import check_token_ids
from treeserve_core.tree import TokenTree

_T = TypeVar("_T")

_FEATURES = np.dtype("<f2")


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
