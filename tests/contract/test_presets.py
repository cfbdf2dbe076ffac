"""What kind of work a request says it is: from each edge to the speculator's sequence, and refused where not known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
from google.rpc import code_pb2
from support.fake_verifier import FakeVerifier
from support.router_rig import RouterRig
from support.verifier_peers import Output, RouterPeer, SpeculatorPeer, running_verifier, submission

from treeserve.common.v1 import common_pb2 as common
from treeserve.inference.v1 import inference_pb2 as pb
from treeserve.verifier.v1 import verifier_pb2
from treeserve_client.request import build_request
from treeserve_core.preset import Preset
from treeserve_core.sampling import SequenceLimits
from treeserve_speculator.messages import sequence_from_proto
from treeserve_wire import codec

KNOWN = "code, chat, summary, translation, creative"


@pytest.mark.parametrize("preset", Preset)
def test_the_codec_keeps_it(preset: Preset) -> None:
    speculation, level = codec.limits_to_proto(SequenceLimits(preset=preset))
    assert speculation.preset == preset.value
    assert codec.limits_from_proto(speculation, level).preset is preset


def test_the_sdk_passes_it_on() -> None:
    assert build_request({"prompt": "x", "preset": "code"}).speculation.preset == "code"
    assert build_request({"prompt": "x"}).speculation.preset == ""


async def test_both_edges_pass_it_to_the_verifier_and_name_the_known_ones_for_an_unknown_one(
    rig: RouterRig, verifier: FakeVerifier
) -> None:
    request = pb.GenerateRequest(prompt="one", stopping=common.StoppingCriteria(max_tokens=1))
    request.speculation.preset = "summary"
    await rig.generate(request)
    request.speculation.preset = "poem"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.generate(request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "speculation.preset" in (refused.value.details() or "") and KNOWN in (refused.value.details() or "")
    async with httpx.AsyncClient(base_url=f"http://{rig.http}", trust_env=False) as http:
        body = {"prompt": "one", "max_tokens": 1, "speculation": {"preset": "code"}}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        answer = await http.post("/v1/completions", json=body | {"speculation": {"preset": "poem"}})
        assert answer.status_code == 400 and KNOWN in answer.text
    assert [submit.speculation.preset for submit in verifier.submits] == ["summary", "code"]


async def test_it_travels_from_the_verifier_to_the_speculators_sequence(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path) as running, RouterPeer(running.address) as router:
        async with SpeculatorPeer(running, lambda *_: None) as speculator:
            message = submission(1, [5, 6], max_tokens=4)
            message.speculation.preset = "creative"
            unknown = submission(2, [5, 6], max_tokens=4)
            unknown.speculation.preset = "poem"
            outputs = router.outputs[1], router.outputs[2] = Output(), Output()
            await router.send(submit=verifier_pb2.Submit(sequences=[message, unknown]))
            for output in outputs:
                await asyncio.wait_for(output.finished.wait(), 30)
        (assignment,) = speculator.assignments
        assert sequence_from_proto(assignment, running.engine.identity.vocab_size).preset is Preset.CREATIVE
        end = outputs[1].end
        assert end is not None and end.status.code == code_pb2.INVALID_ARGUMENT and KNOWN in end.status.message


def test_a_speculator_that_does_not_know_it_drafts_as_for_none() -> None:
    """A newer verifier may know more presets, and a preset never changes a token."""
    assignment = verifier_pb2.Assignment(handle=1, token_ids=[5], preset="poem")
    assert sequence_from_proto(assignment, 100).preset is Preset.NONE
