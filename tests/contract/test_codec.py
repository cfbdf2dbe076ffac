"""The codec: what goes in comes out, the bytes on the wire are pinned, and malformed proposals are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from treeserve.common.v1 import common_pb2
from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.errors import InvalidArgumentError, InvalidTreeError
from treeserve_core.identity import ModelIdentity
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_wire import codec, draft_codec

VOCAB = 1000
BOUNDS = {"vocab_size": VOCAB, "max_nodes": 8, "max_depth": 4, "num_sources": 3}


def floats32(low: float, high: float, **kwargs: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, **kwargs)


token_ids = st.integers(0, VOCAB - 1)

sampling = st.builds(
    SamplingParams,
    temperature=floats32(0, 100),
    top_k=st.integers(0, VOCAB),
    top_p=floats32(0, 1, exclude_min=True),
    min_p=floats32(0, 1),
    repetition_penalty=floats32(0, 10, exclude_min=True),
    presence_penalty=floats32(-2, 2),
    frequency_penalty=floats32(-2, 2),
    logit_bias=st.dictionaries(token_ids, floats32(-100, 100), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    top_log_probs=st.none() | st.integers(0, 20),
)

stopping = st.integers(1, 4096).flatmap(
    lambda max_tokens: st.builds(
        StoppingCriteria,
        max_tokens=st.just(max_tokens),
        min_tokens=st.integers(0, max_tokens),
        stop_strings=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4).map(tuple),
        stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
        ignore_eos=st.booleans(),
    )
)

limits = st.builds(
    SequenceLimits,
    service_class=st.sampled_from(ServiceClass),
    max_nodes=st.none() | st.integers(0, 256),
    ttft_ms=st.none() | floats32(0.125, 1e6),
    tpot_ms=st.none() | floats32(0.125, 1e6),
)
rules = st.sampled_from([Acceptance(), Acceptance(AcceptanceRule.MULTI_STEP)]) | st.builds(
    Acceptance, st.just(AcceptanceRule.TYPICAL), floats32(0, 1, exclude_min=True), floats32(0, 1, exclude_min=True)
)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    n = draw(st.integers(1, 8))
    ids = draw(st.lists(token_ids, min_size=n, max_size=n, unique=True))
    parents = [-1, *(draw(st.integers(max(0, i - 2), i - 1)) for i in range(1, n))]
    log_probs = draw(st.none() | st.lists(floats32(-50, 0), min_size=n, max_size=n).map(tuple))
    masks = draw(st.none() | st.lists(st.integers(0, 7), min_size=n, max_size=n).map(tuple))
    tree = TokenTree(tuple(ids), tuple(parents), log_probs, masks)
    drawn = [draw(st.none() | draws_of([ids[c] for c in children])) if children else None for children in tree.children]
    return dataclasses.replace(tree, draws=tuple(drawn) if any(drawn) else None)


@st.composite
def draws_of(draw: st.DrawFn, children: list[int]) -> Draws:
    drawn = draw(st.lists(st.sampled_from(children), min_size=1, max_size=5))
    weights = [1.0, *[0.0] * (len(children) - 1)] if len(children) == 1 else [1 / len(children)] * len(children)
    return Draws(tuple(drawn), tuple(children), tuple(float(np.float32(weight)) for weight in weights))


def through_bytes(msg: Any) -> Any:
    return type(msg).FromString(msg.SerializeToString())


@given(sampling)
def test_sampling_round_trip(params: SamplingParams) -> None:
    assert codec.sampling_from_proto(through_bytes(codec.sampling_to_proto(params))) == params


@given(stopping)
def test_stopping_round_trip(criteria: StoppingCriteria) -> None:
    decoded = codec.stopping_from_proto(through_bytes(codec.stopping_to_proto(criteria)), max_tokens_default=7)
    assert decoded == criteria


@given(limits, rules)
def test_limits_round_trip(value: SequenceLimits, acceptance: Acceptance) -> None:
    if value.speculates:
        value = dataclasses.replace(value, acceptance=acceptance)
    speculation, level = codec.limits_to_proto(value)
    assert codec.limits_from_proto(through_bytes(speculation), through_bytes(level)) == value


@given(st.integers(1, 2**32 - 1), trees(), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_proposal_round_trip(base: int, tree: TokenTree, draft_us: int, handle: int) -> None:
    proposal = DraftProposal(base, tree, draft_us)
    msg = through_bytes(draft_codec.proposal_to_proto(handle, proposal))
    assert msg.handle == handle
    assert draft_codec.proposal_from_proto(msg, vocab_size=VOCAB, max_nodes=8, max_depth=7, num_sources=3) == proposal


def test_float32_values_are_stable_after_one_hop() -> None:
    first = codec.sampling_from_proto(codec.sampling_to_proto(SamplingParams(temperature=0.7, top_p=0.9)))
    second = codec.sampling_from_proto(codec.sampling_to_proto(first))
    assert first.temperature == 0.699999988079071
    assert second == first


def test_unset_fields_take_the_documented_defaults() -> None:
    assert codec.sampling_from_proto(common_pb2.SamplingParameters()) == SamplingParams()
    assert codec.stopping_from_proto(common_pb2.StoppingCriteria(), 41).max_tokens == 41
    assert codec.limits_from_proto(common_pb2.SpeculationOptions(), common_pb2.ServiceLevel()) == SequenceLimits(
        service_class=ServiceClass.STANDARD, max_nodes=None, ttft_ms=None, tpot_ms=None
    )


def test_disabled_speculation_wins_over_max_nodes() -> None:
    speculation = common_pb2.SpeculationOptions(disabled=True, max_nodes=12)
    assert codec.limits_from_proto(speculation, common_pb2.ServiceLevel()).max_nodes == 0


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        codec.sampling_from_proto(common_pb2.SamplingParameters(**{field: value}))  # type: ignore[arg-type]
    assert raised.value.field == f"sampling.{field}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_targets_that_are_not_positive_numbers_are_refused(value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"service_level\.tpot_ms"):
        codec.limits_from_proto(common_pb2.SpeculationOptions(), common_pb2.ServiceLevel(tpot_ms=value))


def test_unknown_service_class_is_refused() -> None:
    level = common_pb2.ServiceLevel.FromString(b"\x08\x09")
    with pytest.raises(InvalidArgumentError, match=r"service_level\.service_class"):
        codec.limits_from_proto(common_pb2.SpeculationOptions(), level)


def test_an_unknown_acceptance_rule_is_refused() -> None:
    speculation = common_pb2.SpeculationOptions.FromString(b"\x18\x09")
    with pytest.raises(InvalidArgumentError, match=r"speculation\.acceptance: 9 is unknown"):
        codec.limits_from_proto(speculation, common_pb2.ServiceLevel())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"acceptance": 3, "typical_epsilon": 0.0}, "typical_epsilon"),
        ({"acceptance": 3, "typical_epsilon": math.nan}, "typical_epsilon"),
        ({"acceptance": 3, "typical_delta": 1.5}, "typical_delta"),
        ({"acceptance": 2, "typical_delta": 0.3}, "typical_delta"),
        ({"typical_epsilon": 0.1}, "typical_epsilon"),
        ({"acceptance": 2, "disabled": True}, "acceptance"),
    ],
)
def test_a_rule_and_parameters_that_do_not_fit_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"speculation\.{field}"):
        codec.limits_from_proto(common_pb2.SpeculationOptions(**fields), common_pb2.ServiceLevel())


def test_the_typical_rule_has_the_documented_defaults() -> None:
    options = common_pb2.SpeculationOptions(acceptance=common_pb2.ACCEPTANCE_RULE_TYPICAL)
    limits = codec.limits_from_proto(options, common_pb2.ServiceLevel())
    assert limits.acceptance == Acceptance(AcceptanceRule.TYPICAL, 0.09, 0.3)


def test_rules_that_a_peer_names() -> None:
    assert codec.known_acceptance_rules([]) == {AcceptanceRule.REPLAY}, "an older peer names none"
    assert codec.known_acceptance_rules([2, 99]) == {AcceptanceRule.REPLAY, AcceptanceRule.MULTI_STEP}  # type: ignore[list-item]


def test_only_typical_is_labelled_lossy() -> None:
    for rule in AcceptanceRule:
        message = codec.stats_to_proto(SpeculationStats(acceptance=rule))
        assert (message.acceptance, message.lossy) == (int(rule), rule is AcceptanceRule.TYPICAL)


def test_finish_reasons() -> None:
    for reason in FinishReason:
        assert codec.finish_reason_from_proto(codec.finish_reason_to_proto(reason)) is reason
    assert codec.finish_reason_from_proto(common_pb2.FINISH_REASON_UNSPECIFIED) is None
    with pytest.raises(InvalidArgumentError):
        codec.finish_reason_from_proto(99)  # type: ignore[arg-type]


IDENTITY = ModelIdentity("m", "ab", 300, 320, (0, 2))
LOG_PROBS = (PositionLogProbs(5, -0.5, ((5, -0.5), (7, -1.25))), PositionLogProbs(6, -2.0))
STATS = SpeculationStats(steps=3, drafted=12, accepted=4, accepted_per_depth=[3, 1])
PROPOSAL = DraftProposal(
    10, TokenTree((5, 6, 7), (-1, 0, 0), log_probs=(0.0, -0.5, -2.0), source_masks=(0, 1, 3)), draft_us=250
)


def test_identity_log_probs_and_stats_round_trip() -> None:
    assert codec.identity_from_proto(through_bytes(codec.identity_to_proto(IDENTITY))) == IDENTITY
    messages = [through_bytes(msg) for msg in codec.log_probs_to_proto(LOG_PROBS)]
    assert codec.log_probs_from_proto(messages) == LOG_PROBS
    assert codec.stats_from_proto(through_bytes(codec.stats_to_proto(STATS))) == STATS


SPECULATION, LEVEL = codec.limits_to_proto(SequenceLimits(ServiceClass.REALTIME, max_nodes=6, ttft_ms=250, tpot_ms=50))
GOLDEN = {
    "sampling": (
        codec.sampling_to_proto(
            SamplingParams(0.5, 40, 0.75, 0.25, 1.5, 0.5, -0.5, {7: -1.0}, seed=2**64 - 1, top_log_probs=2)
        ),
        "0d0000003f10281d0000403f250000803e2d0000c03f350000003f3d000000bf4207080715000080bf48ffffffffffffffffff015002",
    ),
    "stopping": (
        codec.stopping_to_proto(StoppingCriteria(64, 2, ("\n", "é"), (3, 300), True)),
        "084010021a010a1a02c3a9220303ac022801",
    ),
    "speculation": (SPECULATION, "10061801"),
    "service_level": (LEVEL, "08011500007a431d00004842"),
    "identity": (codec.identity_to_proto(IDENTITY), "0a016d1202616218ac022202000228c002"),
    "log_probs": (codec.log_probs_to_proto(LOG_PROBS)[0], "0a07080515000000bf1207080515000000bf12070807150000a0bf"),
    "stats": (codec.stats_to_proto(STATS), "0803100c1804220203012801"),
    "proposal": (
        draft_codec.proposal_to_proto(3, PROPOSAL),
        "0803100a1a0305060722030100002a0c00000000000000bf000000c0320300010338fa01",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    msg, expected = GOLDEN[name]
    assert isinstance(msg, Message)
    assert msg.SerializeToString(deterministic=True).hex() == expected


def node_draws(**changes: Any) -> verifier_pb2.NodeDraws:
    fields: dict[str, Any] = {"node": 0, "token_ids": [6, 6], "support": [6], "weights": [1.0]}
    return verifier_pb2.NodeDraws(**(fields | changes))


def proposal_message(**changes: Any) -> verifier_pb2.TreeProposal:
    fields: dict[str, Any] = {"base_committed_len": 3, "token_ids": [5, 6, 7], "parents": [-1, 0, 1]}
    return verifier_pb2.TreeProposal(**(fields | changes))


def test_the_well_formed_proposal_is_taken() -> None:
    assert draft_codec.proposal_from_proto(proposal_message(), **BOUNDS).tree == TokenTree((5, 6, 7), (-1, 0, 1))
    drawn = draft_codec.proposal_from_proto(proposal_message(draws=[node_draws()]), **BOUNDS).tree
    assert drawn == TokenTree((5, 6, 7), (-1, 0, 1), draws=(Draws((6, 6), (6,), (1.0,)), None, None))


def test_ids_to_draw_outside_the_vocabulary_are_refused() -> None:
    message = proposal_message(draws=[node_draws(support=[6, VOCAB], weights=[0.5, 0.5])])
    with pytest.raises(InvalidArgumentError, match=r"draws\.support"):
        draft_codec.proposal_from_proto(message, **BOUNDS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": [], "parents": []}, "0 nodes"),
        ({"token_ids": range(9), "parents": range(-1, 8)}, "9 nodes"),
        ({"token_ids": range(6), "parents": range(-1, 5)}, "depth 5"),
        ({"parents": [-1, 0]}, "2 parents"),
        ({"parents": [0, 0, 0]}, "root's parent"),
        ({"parents": [-1, 2, 0]}, "parents precede"),
        ({"parents": [-1, 1, 0]}, "parents precede"),
        ({"parents": [-1, -1, 0]}, "parents precede"),
        ({"token_ids": [5, 6, 6], "parents": [-1, 0, 0]}, "repeats token"),
        ({"log_probs": [0.0]}, "1 log-probabilities"),
        ({"log_probs": [0.0, math.nan, -1.0]}, "log-probabilities must be"),
        ({"log_probs": [0.0, 0.5, -1.0]}, "log-probabilities must be"),
        ({"source_masks": [1]}, "1 source masks"),
        ({"source_masks": [0, 1, 8]}, "source mask names"),
        ({"draws": [node_draws(node=3)]}, "draws for node 3"),
        ({"draws": [node_draws(), node_draws()]}, "draws for node 0"),
        ({"draws": [node_draws()] * 4}, "3 tokens but draws for 4"),
        ({"draws": [node_draws(token_ids=[])]}, "0 draws"),
        ({"draws": [node_draws(token_ids=[6] * 65)]}, "more than 64 draws"),
        ({"draws": [node_draws(token_ids=[7])]}, "no weight"),
        ({"draws": [node_draws(support=[6, 7], weights=[0.5, 0.5], token_ids=[7])]}, "not among its children"),
        ({"draws": [node_draws(support=[6, 6], weights=[0.5, 0.5])]}, "repeated"),
        ({"draws": [node_draws(weights=[0.9])]}, "sum to 0.9"),
        ({"draws": [node_draws(support=[6, 7], weights=[1.0, 0.0])]}, "positive"),
        ({"draws": [node_draws(weights=[math.nan])]}, "positive"),
        ({"draws": [node_draws(weights=[1.0, 0.5])]}, "1 ids with 2 weights"),
        ({"draws": [node_draws(support=range(65), weights=[1 / 65] * 65)]}, "64 ids"),
    ],
)
def test_malformed_trees_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidTreeError, match=reason):
        draft_codec.proposal_from_proto(proposal_message(**changes), **BOUNDS)


def test_token_ids_outside_the_vocabulary_and_a_base_of_zero_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        draft_codec.proposal_from_proto(proposal_message(token_ids=[5, 6, VOCAB]), **BOUNDS)
    with pytest.raises(InvalidArgumentError, match="base_committed_len"):
        draft_codec.proposal_from_proto(proposal_message(base_committed_len=0), **BOUNDS)


def test_an_oversize_tree_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_args: Any) -> TokenTree:
        raise AssertionError("built")

    monkeypatch.setattr(draft_codec, "TokenTree", build)
    huge = proposal_message(token_ids=[1] * 100_000, parents=[-1] * 100_000)
    with pytest.raises(InvalidTreeError, match="100000 nodes"):
        draft_codec.proposal_from_proto(huge, **BOUNDS)


def test_every_field_of_the_sampling_message_has_its_parameter() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in common_pb2.SamplingParameters.DESCRIPTOR.fields} == ours
