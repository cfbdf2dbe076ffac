"""A drafter in the verifier's own process: the same tokens, sooner, and no speculator in sight."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.verifier_peers import RouterPeer, SpeculatorPeer, running_verifier

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.proposal import DraftProposal
from treeserve_core.tree import TokenTree
from treeserve_speculator.colocated import ColocatedDrafter
from treeserve_speculator.native_drafter import NativeDrafter

LOOPING = [10, 20, 30, 10, 20, 30, 10, 20, 30, 10]
SOURCES = ("ngram", "suffix")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_it_drafts_without_a_speculator_and_changes_no_token(
    tiny_model: Path, tmp_path: Path, temperature: float
) -> None:
    async with running_verifier(tiny_model, tmp_path, colocated_sources=SOURCES) as running:
        async with RouterPeer(running.address) as router:
            sampling = {"temperature": temperature, "seed": 5, "max_tokens": 96}
            plain = await router.generate(1, LOOPING, speculate=False, **sampling)
            first = await router.generate(2, LOOPING, tenant="t", **sampling)
            second = await router.generate(3, LOOPING, tenant="t", **sampling)
        assert first.token_ids == second.token_ids == plain.token_ids
        assert plain.end is not None and plain.end.speculation.drafted == 0
        assert second.end is not None
        # The suffix source has seen the whole of it.
        assert second.end.speculation.accepted > len(plain.token_ids) / 2
        assert running.verifier.loop.load().speculators == 0
        running.check_all_blocks_free()


async def test_a_speculator_beside_it_is_merged_with(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path, colocated_sources=SOURCES) as running:
        async with RouterPeer(running.address) as router:
            truth = (await router.generate(1, LOOPING, speculate=False)).token_ids

            def draft(tokens: list[int], budget: int, seed: int) -> TokenTree:
                return TokenTree.chain([tokens[-1], *truth[len(tokens) - len(LOOPING) :][:2]])

            async with SpeculatorPeer(running, draft):
                output = await router.generate(2, LOOPING)
        assert output.token_ids == truth
        assert output.end is not None
        assert output.end.speculation.accepted >= len(truth) / 2, "the speculator knows all"


@pytest.mark.parametrize("method", ["assign", "draft", "commit", "learn", "release", "is_due", "a wrong tree"])
async def test_one_that_raises_costs_nothing_but_speed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls: list[str] = []

    def fails(*args: object, **options: object) -> None:
        calls.append(method)
        raise OSError("no room left on the device")

    def drafts_for_a_stranger(*args: object) -> list[tuple[int, DraftProposal]]:
        calls.append(method)
        return [(99, DraftProposal(1, TokenTree.chain([1, 2])))]

    async with running_verifier(tiny_model, tmp_path, colocated_sources=SOURCES) as running:
        async with RouterPeer(running.address) as router:
            plain = await router.generate(1, LOOPING, speculate=False)
            for drafter in (ColocatedDrafter, NativeDrafter):  # whichever could be built
                if method == "a wrong tree":
                    monkeypatch.setattr(drafter, "draft", drafts_for_a_stranger)
                else:
                    monkeypatch.setattr(drafter, method, property(fails) if method == "is_due" else fails)
            outputs = [await router.generate(handle, LOOPING) for handle in (2, 3, 4)]
        assert [output.token_ids for output in outputs] == [plain.token_ids] * 3
        assert calls == [method], "it is not called again"
        assert outputs[-1].end is not None and outputs[-1].end.speculation.drafted == 0
        running.check_all_blocks_free()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"colocated_sources": ("ssm",)}, "is none of"),
        ({"colocated_drafter": "nowhere.at_all:build"}, "cannot be loaded"),
    ],
)
async def test_what_cannot_draft_here_is_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        async with running_verifier(tiny_model, tmp_path, **{"colocated_sources": SOURCES, **changes}):
            pass


async def test_trained_sources_that_do_not_exist_leave_nothing_to_draft_with(tiny_model: Path, tmp_path: Path) -> None:
    async with running_verifier(tiny_model, tmp_path, colocated_sources=("trained",)) as running:
        async with RouterPeer(running.address) as router:
            output = await router.generate(1, LOOPING)
        assert output.end is not None and output.end.speculation.drafted == 0
