"""Acceptance rules over the wire: negotiated, passed on, labelled wherever they show, and refused where not known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import structlog
from google.rpc import code_pb2
from support.fake_verifier import FakeVerifier, fake_verifiers, pseudo_random
from support.router_rig import RouterRig, load_tokenizer, running_router
from support.verifier_peers import Output, RouterPeer, RunningVerifier, SpeculatorPeer, running_verifier, submission

import treeserve_client as sdk
from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.verifier.v1 import verifier_pb2
from treeserve_client.generation import CallOptions, Generation
from treeserve_client.request import build_request
from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.outcome import SpeculationStats
from treeserve_core.proposal import DraftProposal
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.batch import SequenceRows
from treeserve_router.admission import RouterRequest
from treeserve_router.mailbox import Mailbox
from treeserve_router.placement import VerifierState, place
from treeserve_router.queue import Ticket
from treeserve_wire.draft_codec import proposal_from_proto, proposal_to_proto

RULES = [rule.label for rule in AcceptanceRule]
ALL_RULES = [int(rule) for rule in AcceptanceRule]
PROMPT = [50, 60, 70, 80]


def rule_value(label: str) -> common.AcceptanceRule.ValueType:
    return common.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{label.upper()}")


class TestRouter:
    @pytest.fixture
    async def rigs(self, tmp_path: Path) -> AsyncIterator[tuple[RouterRig, FakeVerifier]]:
        tokenizer = load_tokenizer(tmp_path)
        verifier = FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250), acceptance_rules=ALL_RULES)
        async with fake_verifiers(verifier), running_router(tmp_path, tokenizer, [verifier]) as rig:
            yield rig, verifier

    @pytest.mark.parametrize("label", RULES)
    async def test_a_rule_reaches_the_verifier_and_labels_the_answer(
        self, rigs: tuple[RouterRig, FakeVerifier], label: str
    ) -> None:
        rig, verifier = rigs
        options = common.SpeculationOptions(acceptance=rule_value(label))
        request = pb.GenerateRequest(
            prompt="one two", speculation=options, stopping=common.StoppingCriteria(max_tokens=6)
        )
        with structlog.testing.capture_logs() as logs:
            seen = await rig.generate(request)
        lossy = label == "typical"
        assert verifier.submits[0].speculation.acceptance == rule_value(label)
        assert seen.started is not None and seen.started.acceptance == rule_value(label)
        assert seen.finished is not None
        assert seen.finished.speculation.acceptance == rule_value(label)
        assert seen.finished.speculation.lossy is lossy
        counted = rig.metric(
            "treeserve_router_output_tokens_per_acceptance_total", acceptance=label, lossy=str(lossy).lower()
        )
        assert counted == 6
        ended = [entry for entry in logs if entry["event"] == "request ended"]
        assert [(entry["acceptance"], entry["lossy"]) for entry in ended] == [(label, lossy)]

    @pytest.mark.parametrize("label", RULES)
    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_http(self, rigs: tuple[RouterRig, FakeVerifier], label: str, path: str, stream: bool) -> None:
        rig, verifier = rigs
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 4,
            "stream": stream,
            "speculation": {"acceptance": label},
        }
        body |= {"prompt": "one"} if path == "completions" else {"messages": [{"role": "user", "content": "one"}]}
        if label == "typical":
            body["speculation"] |= {"typical_epsilon": 0.25, "typical_delta": 0.5}
        async with httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as http:
            response = await http.post(f"/v1/{path}", json=body)
        assert response.status_code == 200
        answer = response.json() if not stream else json.loads(response.text.split("data: ")[-2])
        labels = answer["metrics"]["speculative_decoding"]
        assert (labels["acceptance"], labels["lossy"]) == (label, label == "typical")
        submitted = verifier.submits[0].speculation
        assert submitted.acceptance == rule_value(label)
        assert submitted.HasField("typical_epsilon") is (label == "typical")
        if label == "typical":
            assert (submitted.typical_epsilon, submitted.typical_delta) == (0.25, 0.5)

    @pytest.mark.parametrize(
        "speculation",
        [
            {"acceptance": "hopeful"},
            {"acceptance": "MULTI_STEP"},
            {"acceptance": 2},
            {"acceptance": "typical", "typical_epsilon": 0},
            {"acceptance": "typical", "typical_delta": 2},
            {"acceptance": "multi_step", "typical_delta": 0.3},
            {"acceptance": "typical", "enabled": False},
        ],
    )
    async def test_http_refuses_what_makes_no_sense(
        self, rigs: tuple[RouterRig, FakeVerifier], speculation: dict[str, Any]
    ) -> None:
        async with httpx.AsyncClient(base_url=f"http://{rigs[0].http}", trust_env=False) as http:
            body = {"model": "tiny", "prompt": "one", "max_tokens": 4, "speculation": speculation}
            response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "acceptance" in response.text or "typical_" in response.text

    async def test_grpc_refuses_an_unknown_rule(self, rigs: tuple[RouterRig, FakeVerifier]) -> None:
        options = common.SpeculationOptions.FromString(b"\x18\x63")  # acceptance = 99
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rigs[0].generate(pb.GenerateRequest(prompt="one", speculation=options))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "speculation.acceptance" in (refused.value.details() or "")

    async def test_a_verifier_that_does_not_know_the_rule_never_gets_the_request(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(tmp_path)
        older = FakeVerifier(tokenizer, f"unix:{tmp_path}/a.sock", pseudo_random(2, 250))
        options = common.SpeculationOptions(acceptance=common.ACCEPTANCE_RULE_MULTI_STEP)
        request = pb.GenerateRequest(
            prompt="one two", speculation=options, stopping=common.StoppingCriteria(max_tokens=6)
        )
        async with (
            fake_verifiers(older),
            running_router(tmp_path, tokenizer, [older], verifier_wait_s=0.1) as rig,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rig.generate(request)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE and not older.submits
            request.speculation.acceptance = common.ACCEPTANCE_RULE_REPLAY
            assert (await rig.generate(request)).finished is not None

    def test_placement_looks_for_a_verifier_that_knows_the_rule(self) -> None:
        lossy = ticket(AcceptanceRule.TYPICAL)
        older = VerifierState("host:a", "a", 100, 4, total_blocks=9, free_blocks=9)
        newer = VerifierState(
            "host:b", "b", 100, 4, 3, total_blocks=9, free_blocks=1, acceptance_rules=frozenset(AcceptanceRule)
        )
        assert place(lossy, [older, newer], lambda _: True) == newer
        assert place(lossy, [older], lambda _: True) is None
        assert place(ticket(AcceptanceRule.REPLAY), [older], lambda _: True) == older


def ticket(rule: AcceptanceRule) -> Ticket:
    request = RouterRequest(
        "r", (1,), (), SamplingParams(), StoppingCriteria(5), SequenceLimits(acceptance=Acceptance(rule))
    )
    return Ticket(request, (), Mailbox())


class TestClient:
    def generation(self, **params: Any) -> Generation:
        return Generation(build_request({"prompt": "x", **params}), CallOptions())  # type: ignore[typeddict-item]

    def test_parameters(self) -> None:
        request = self.generation(acceptance="typical", typical_epsilon=0.25).request
        assert request.speculation.acceptance == common.ACCEPTANCE_RULE_TYPICAL
        assert request.speculation.typical_epsilon == 0.25 and not request.speculation.HasField("typical_delta")
        with pytest.raises(sdk.InvalidArgument, match="'hopeful' is unknown"):
            self.generation(acceptance="hopeful")

    def test_a_router_that_ignores_the_rule_is_found_out(self) -> None:
        """A router of before the field existed answers a request for multi_step with Started, and knows no rule."""
        older = pb.GenerateResponse(started=pb.Started(request_id="r", model="m", seed=1, prompt_tokens=1))
        with pytest.raises(sdk.InvalidArgument, match="does not know 'multi_step'"):
            self.generation(acceptance="multi_step").receive(older)
        plain = self.generation()
        plain.receive(older)
        assert plain.started is not None and plain.started.acceptance == "replay"

    def test_labels(self) -> None:
        stats = common.SpeculationStats(steps=1, acceptance=common.ACCEPTANCE_RULE_TYPICAL, lossy=True)
        decoded = sdk.SpeculationStats.from_proto(stats)
        assert (decoded.acceptance, decoded.lossy) == ("typical", True)
        assert not sdk.SpeculationStats.from_proto(common.SpeculationStats(steps=1)).lossy


def uniform_draws(tokens: list[int], budget: int, seed: int) -> TokenTree | None:
    """Three draws among eight tokens below the root, from a generator that nobody else uses."""
    rng = np.random.default_rng([len(tokens), seed])
    drawn = tuple(int(t) for t in rng.integers(60, 68, 3))[:budget]
    distinct = tuple(dict.fromkeys(drawn))
    draws = Draws(drawn, tuple(range(60, 68)), (0.125,) * 8)
    none = (None,) * len(distinct)
    return TokenTree((tokens[-1], *distinct), (-1, *[0] * len(distinct)), draws=(draws, *none))


class TestVerifier:
    @pytest.fixture
    async def running(self, tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningVerifier]:
        async with running_verifier(tiny_model, tmp_path) as running:
            yield running
            running.check_all_blocks_free()

    async def generate(
        self, router: RouterPeer, handle: int, speculation: dict[str, Any], max_tokens: int = 24, **sampling: Any
    ) -> Output:
        message = submission(handle, PROMPT, max_tokens=max_tokens, stopping={"ignore_eos": True}, **sampling)
        message.speculation.CopyFrom(common.SpeculationOptions(**speculation))
        output = router.outputs[handle] = Output()
        await router.send(submit=verifier_pb2.Submit(sequences=[message]))
        await asyncio.wait_for(output.finished.wait(), 30)
        return output

    async def test_it_says_which_rules_it_knows(self, running: RunningVerifier) -> None:
        async with RouterPeer(running.address) as router:
            assert router.welcome is not None and list(router.welcome.acceptance_rules) == ALL_RULES

    async def test_an_unknown_rule_is_refused(self, running: RunningVerifier) -> None:
        message = submission(1, PROMPT)
        message.speculation.MergeFromString(b"\x18\x63")
        async with RouterPeer(running.address) as router:
            output = router.outputs[1] = Output()
            await router.send(submit=verifier_pb2.Submit(sequences=[message]))
            await asyncio.wait_for(output.finished.wait(), 30)
        assert output.end is not None and output.end.status.code == code_pb2.INVALID_ARGUMENT
        assert "speculation.acceptance" in output.end.status.message

    @pytest.mark.parametrize("label", RULES)
    async def test_greedy_is_greedy_under_every_rule(self, running: RunningVerifier, label: str) -> None:
        async with RouterPeer(running.address) as router:
            plain = await self.generate(router, 1, {"disabled": True})
            async with SpeculatorPeer(running, uniform_draws):
                output = await self.generate(router, 2, {"acceptance": rule_value(label)})
        assert output.token_ids == plain.token_ids

    @pytest.mark.parametrize("label", RULES)
    async def test_labels_and_counts(self, running: RunningVerifier, label: str) -> None:
        lossy = label == "typical"
        async with RouterPeer(running.address) as router, SpeculatorPeer(running, uniform_draws) as speculator:
            output = await self.generate(router, 1, {"acceptance": rule_value(label)}, temperature=1.0, seed=3)
            assert [a.acceptance for a in speculator.assignments] == [rule_value(label)]
        assert output.end is not None and len(output.token_ids) == 24
        assert (output.end.speculation.acceptance, output.end.speculation.lossy) == (rule_value(label), lossy)
        labels = {"acceptance": label, "lossy": str(lossy).lower()}
        name = "treeserve_verifier_emitted_tokens_per_acceptance_total"
        assert running.registry.get_sample_value(name, labels) == 24

    async def test_replay_gives_the_tokens_of_plain_decoding_and_the_others_do_not(
        self, running: RunningVerifier
    ) -> None:
        sampling = {"temperature": 1.0, "seed": 5}
        async with RouterPeer(running.address) as router:
            plain = await self.generate(router, 1, {"disabled": True}, **sampling)
            async with SpeculatorPeer(running, uniform_draws):
                outputs = {
                    label: await self.generate(router, 2 + i, {"acceptance": rule_value(label)}, **sampling)
                    for i, label in enumerate(RULES)
                }
        assert outputs["replay"].token_ids == plain.token_ids
        assert plain.token_ids not in (outputs["multi_step"].token_ids, outputs["typical"].token_ids)

    async def test_draws_decide_as_they_do_in_process(self, running: RunningVerifier) -> None:
        """The second token under multi_step, for many seeds, against `accept` with the same logits and draws."""
        options = {"acceptance": rule_value("multi_step")}
        differs = compared = 0
        async with RouterPeer(running.address) as router, SpeculatorPeer(running, uniform_draws):
            for seed in range(24):
                output = await self.generate(router, seed + 1, options, 3, temperature=1.5, seed=seed)
                assert output.end is not None
                first, second, _ = output.token_ids
                assert first == self.in_process(running, [*PROMPT], seed, None)
                if drafted := output.end.speculation.drafted:
                    compared += 1
                    tokens = [*PROMPT, first]
                    possible = {
                        self.in_process(running, tokens, seed, tree)
                        for tree in (uniform_draws(tokens, n, seed) for n in (1, 2, 3))
                        if tree is not None and len(tree) == drafted + 1
                    }
                    assert second in possible
                    differs += second != self.in_process(running, tokens, seed, None)
        assert compared > 5 and differs > 0

    def in_process(self, running: RunningVerifier, tokens: list[int], seed: int, tree: TokenTree | None) -> int:
        runner = running.engine.runner
        runner.blocks.add(-5)
        runner.blocks.reserve(-5, len(tokens))
        (logits,) = runner.forward([SequenceRows.from_chain(-5, tokens, logits_rows=[len(tokens) - 1])])
        row = logits[0].copy()
        runner.blocks.rollback(-5)
        runner.blocks.free(-5)
        sampler = SequenceSampler(
            SamplingParams(temperature=1.5, seed=seed),
            StoppingCriteria(50),
            PROMPT,
            eos_token_ids=(),
            vocab_size=running.engine.identity.vocab_size,
            generated_token_ids=tokens[len(PROMPT) :],
        )
        tree = tree or TokenTree.root_only(tokens[-1])
        outcome = accept(tree, lambda _: row, sampler, None, Acceptance(AcceptanceRule.MULTI_STEP))
        return outcome.token_ids[0]

    async def test_a_malformed_draw_harms_nobody(self, running: RunningVerifier) -> None:
        def broken(tokens: list[int], budget: int, seed: int) -> TokenTree | None:
            return None

        async with RouterPeer(running.address) as router, SpeculatorPeer(running, broken) as speculator:
            task = asyncio.create_task(
                self.generate(router, 1, {"acceptance": rule_value("multi_step")}, 60, temperature=1.0)
            )
            await asyncio.wait_for(speculator.assigned.wait(), 10)
            (handle,) = speculator.tokens
            tokens = speculator.tokens[handle]
            proposal = verifier_pb2.TreeProposal(
                handle=handle, base_committed_len=len(tokens), token_ids=[tokens[-1], 60], parents=[-1, 0],
                draws=[verifier_pb2.NodeDraws(node=0, token_ids=[61], support=[61], weights=[1.0])],
            )  # fmt: skip
            await speculator.propose(proposal)
            rejection = await asyncio.wait_for(speculator.rejections.get(), 10)
            assert rejection.status.code == code_pb2.INVALID_ARGUMENT
            assert len((await task).token_ids) == 60


def test_stats_of_a_replayed_request_keep_their_label() -> None:
    stats = SpeculationStats(acceptance=AcceptanceRule.TYPICAL)
    stats.add(SpeculationStats(2, 4, 1, [1]))
    assert stats.acceptance is AcceptanceRule.TYPICAL


def test_the_largest_proposal_fits_a_message() -> None:
    """64 expanded nodes of 64 draws from 64 ids each, with the largest ids: far below the 1 MiB of a message."""
    support = tuple(range(150_000, 150_064))
    draws = Draws((150_000,) * 64, support, (1 / 64,) * 64)
    tree = TokenTree.chain([5, *[150_000] * 64])
    tree = TokenTree(tree.token_ids, tree.parents, draws=(*[draws] * 64, None))
    message = proposal_to_proto(1, DraftProposal(9, tree))
    assert message.ByteSize() < (1 << 20) // 16
    decoded = proposal_from_proto(message, vocab_size=200_000, max_nodes=65, max_depth=64, num_sources=1)
    assert decoded.tree == tree
