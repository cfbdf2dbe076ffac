"""Whom a request is for: from the header that a gateway sets, as a label, to the speculator's sequence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
from support.fake_verifier import FakeVerifier, fake_verifiers
from support.router_rig import RouterRig, running_router
from support.verifier_peers import RouterPeer, SpeculatorPeer, running_verifier
from support.waiting import until

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.verifier.v1 import verifier_pb2
from treeserve_core.errors import InvalidArgumentError
from treeserve_router.admission import tenant_label
from treeserve_router.config import RouterConfig
from treeserve_speculator.messages import sequence_from_proto
from treeserve_text.tokenizer import Tokenizer

Metadata = tuple[tuple[str, str], ...]
HEADER = "x-tenant"


async def _label(rig: RouterRig, verifier: FakeVerifier, metadata: Metadata) -> str:
    """What the verifier is told over gRPC, and the same over HTTP."""
    await rig.generate(
        pb.GenerateRequest(prompt="one", stopping=common.StoppingCriteria(max_tokens=1)), metadata=metadata
    )
    body = {"prompt": "one", "max_tokens": 1}
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"http://{rig.http}/v1/completions", json=body, headers=list(metadata))
    assert answer.status_code == 200
    over_grpc, over_http = (submit.tenant for submit in verifier.submits[-2:])
    assert over_grpc == over_http
    return over_grpc


async def test_the_gateways_header_becomes_a_label(
    tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    async with (
        fake_verifiers(verifier),
        running_router(tmp_path, tokenizer, [verifier], tenant_header=HEADER) as rig,
    ):
        acme = await _label(rig, verifier, ((HEADER, "acme"),))
        assert acme == tenant_label("acme") and "acme" not in acme and len(acme) == 32
        assert await _label(rig, verifier, ((HEADER, "other"),)) not in ("", acme)
        for unknown in ((), ((HEADER, ""),), ((HEADER, "acme"), (HEADER, "other"))):
            assert await _label(rig, verifier, unknown) == "", "nobody is known: it shares with nobody"
        with pytest.raises(grpc.aio.AioRpcError, match="tenant"):
            await rig.generate(pb.GenerateRequest(prompt="one"), metadata=((HEADER, "a" * 129),))


async def test_without_a_gateway_all_requests_are_one_tenants_whatever_they_say(
    rig: RouterRig, verifier: FakeVerifier
) -> None:
    labels = [await _label(rig, verifier, metadata) for metadata in ((), ((HEADER, "acme"),))]
    assert labels[0] == labels[1] == tenant_label("") != ""


async def test_two_tenants_may_use_the_same_request_id_at_once(
    tmp_path: Path, tokenizer: Tokenizer, verifier: FakeVerifier
) -> None:
    request = pb.GenerateRequest(
        prompt="one", request_id="mine", stopping=common.StoppingCriteria(max_tokens=6, ignore_eos=True)
    )
    async with (
        fake_verifiers(verifier),
        running_router(tmp_path, tokenizer, [verifier], tenant_header=HEADER) as rig,
    ):
        verifier.hold_at = 3
        running = []
        for tenant in ("acme", "other", "other"):
            running.append(asyncio.create_task(rig.generate(request, metadata=((HEADER, tenant),))))
            await until(lambda: len(verifier.submits) == len(running))
        await until(lambda: running[1].done())
        verifier.hold_at = None
        reasons = [each.finished.reason for each in await asyncio.gather(*running) if each.finished is not None]
    assert reasons == [common.FINISH_REASON_LENGTH, common.FINISH_REASON_CANCELLED, common.FINISH_REASON_LENGTH]


async def test_the_label_travels_from_the_verifier_to_the_speculators_sequence(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        async with SpeculatorPeer(running, lambda *_: None) as speculator:
            await router.generate(1, [5, 6], tenant="label", max_tokens=4)
            await asyncio.wait_for(speculator.assigned.wait(), 5)
        (assignment,) = speculator.assignments
        assert sequence_from_proto(assignment, running.engine.identity.vocab_size).tenant == "label"
        refused = await router.generate(2, [5, 6], tenant="a" * 65)
        assert refused.end is not None and "tenant" in refused.end.status.message


def test_a_label_that_is_too_long_is_refused_by_the_speculator() -> None:
    with pytest.raises(InvalidArgumentError, match="tenant"):
        sequence_from_proto(verifier_pb2.Assignment(handle=1, token_ids=[5], tenant="a" * 65), 100)


@pytest.mark.parametrize("name", ["X-Tenant", "x tenant", "x:tenant"])
def test_a_header_that_no_gateway_could_set_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="tenant_header"):
        RouterConfig(Path("model"), "m", tenant_header=name)
