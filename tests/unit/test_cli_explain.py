"""`treeserve explain` with clients that answer from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from treeserve_cli import explain, main
from treeserve_client import Decision, Explanation, NotFound, PlacementCost, Unavailable

COST = PlacementCost(wait_s=0.012, prefill_s=0.25, load_s=0.5, slow_s=0.0, affinity_s=-0.25)
EXPLANATION = Explanation(
    request_id="r-1",
    router_id="router-1",
    service_class="standard",
    age_s=12.5,
    decisions=(
        Decision("queued", 0.0, "300 tokens; 2 as urgent requests wait", "", None, 0),
        Decision("blocked", 0.1, "1 verifier(s) with no free place [full]", "", None, 4),
        Decision("placed", 2.345, "after 2.345 s", "verifier-0", COST, 0),
    ),
    dropped=3,
)


class FakeClient:
    """Answers by address."""

    answers: dict[str, Any]

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def explain(self, request_id: str) -> Explanation:
        assert request_id == "r-1"
        answer = self.answers[self.address]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(explain, "Client", FakeClient)
    FakeClient.answers = {}
    return FakeClient.answers


def invoke(*args: str) -> Any:
    return CliRunner().invoke(main.app, ["explain", "r-1", *args], env={"COLUMNS": "120"})


def test_a_table_says_when_what_where_and_why(answers: dict[str, Any]) -> None:
    answers["localhost:50051"] = EXPLANATION
    result = invoke()
    assert result.exit_code == 0
    rows = [row for row in result.stdout.splitlines() if row.strip()]
    assert "r-1 (standard) at router-1, 12.5 s ago" in rows[0]
    for cells in (
        ("0.000 s", "queued", "300 tokens; 2 as urgent requests wait"),
        ("0.100 s", "blocked x5", "1 verifier(s) with no free place [full]"),
        ("2.345 s", "placed", "verifier-0", "after 2.345 s"),
        ("cost 0.512 s: wait +0.012 prefill +0.250 load +0.500 session -0.250",),
        ("3 earlier", "forgotten"),
    ):
        assert any(all(cell in row for cell in cells) for row in rows), cells
    assert "slow" not in result.stdout


def test_every_router_that_knows_something_is_asked(answers: dict[str, Any]) -> None:
    answers |= {"a:1": NotFound("not here"), "b:1": EXPLANATION, "c:1": EXPLANATION}
    result = invoke("--address", "a:1,b:1,c:1")
    assert result.exit_code == 0
    assert result.stdout.count("router-1") == 2


def test_a_router_that_cannot_be_asked_does_not_hide_what_others_know(answers: dict[str, Any]) -> None:
    answers |= {"a:1": Unavailable("no route"), "b:1": EXPLANATION, "c:1": NotFound("not here")}
    result = invoke("--address", "a:1,b:1,c:1")
    assert result.exit_code == 0
    assert result.stdout.count("router-1") == 1
    assert result.stderr == "treeserve: a:1: no route\n"


def test_where_nobody_knows_it_the_router_that_could_not_be_asked_is_the_reason(answers: dict[str, Any]) -> None:
    answers |= {"a:1": NotFound("not here"), "b:1": Unavailable("no route"), "c:1": NotFound("not here")}
    result = invoke("--address", "a:1,b:1,c:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("treeserve: no route (is `treeserve up` running")


def test_json_is_one_object_for_each_router(answers: dict[str, Any]) -> None:
    answers["localhost:50051"] = EXPLANATION
    told = json.loads(invoke("--json").stdout)
    assert (told["request_id"], told["dropped"], len(told["decisions"])) == ("r-1", 3, 3)
    assert told["decisions"][2]["cost"]["prefill_s"] == 0.25


@pytest.mark.parametrize("error", [NotFound("this router knows nothing of it"), Unavailable("no route")])
def test_errors_go_to_stderr(answers: dict[str, Any], error: Exception) -> None:
    answers["localhost:50051"] = error
    result = invoke()
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(error) in result.stderr
