"""The acceptance benchmark: its prompts, its arithmetic, and what it does where a drafter is missing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from support.recorded_target import SSM_FIELDS, RecordedTarget

from benchmarks.acceptance import live, report, run, tables
from benchmarks.acceptance.configurations import MERGED, OUT_OF_THE_BOX, Configuration, find_configurations
from benchmarks.acceptance.costs import FLAT_GPU, CostTable
from benchmarks.acceptance.passes import GREEDY, LOOPING, MODES, SAMPLED, UNCOUPLED, Pass, Passes, Target, in_turns
from benchmarks.acceptance.record import PlainOutput, Prompt, Recorder
from benchmarks.acceptance.tally import Tally
from benchmarks.acceptance.tasks import FOLDER, TASKS, own_prompts, prompts_of_file
from benchmarks.peers import tasks as peers_tasks
from treeserve_core.tree import TokenTree
from treeserve_engine.interface import Model
from treeserve_training import task_templates, word_lists
from treeserve_verifier.cost_model import CostModel

WITH_PASSAGE = ("summary", "rewrite", "extraction")
STEEP = CostTable("steep", "made up", CostModel({1: 2.0, 2: 3.0, 3: 4.0, 4: 8.0}))

# --- prompts


def test_each_task_has_many_distinct_prompts() -> None:
    prompts = own_prompts()
    assert len(TASKS) >= 6 and tuple(prompts) == TASKS
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(TASKS)
    questions = [conversation[-1]["content"] for ours in prompts.values() for conversation in ours]
    assert len({question[:40] for question in questions}) == len(questions)
    for task, ours in prompts.items():
        assert len(ours) >= 12
        for conversation in ours:
            assert conversation[-1]["role"] == "user"
            words = len(conversation[-1]["content"].split())
            assert (40 if task in WITH_PASSAGE else 7) <= words <= 250


def word_runs(text: str, size: int = 7) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def test_prompts_are_held_out() -> None:
    used = [Path(module.__file__ or "").read_text() for module in (task_templates, word_lists)]
    used += [message["content"] for ours in peers_tasks.load_tasks().values() for c in ours for message in c]
    known = set().union(*map(word_runs, used))
    for ours in own_prompts().values():
        for conversation in ours:
            assert not word_runs(conversation[-1]["content"]) & known


@pytest.mark.parametrize(
    ("lines", "tasks"),
    [
        ([{"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}], {"file/writing": ["Compose"]}),
        (
            [{"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}],
            {"file": ["Hi"]},
        ),
        ([{"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Go on"}], {"file": ["Hi", "Go on"]}),
        ([{"conversations": [{"from": "gpt", "value": "nobody asked"}]}, {"prompt": "Go"}], {"file": ["Go"]}),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_layouts_of_others_are_read(
    tmp_path: Path, lines: list[dict[str, object]], tasks: dict[str, list[str]], as_list: bool
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(lines) if as_list else "\n\n".join(map(json.dumps, lines)))
    assert {task: [c[-1]["content"] for c in found] for task, found in prompts_of_file(path).items()} == tasks


def test_a_conversation_keeps_its_earlier_turns(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    turns = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Why?"), ("gpt", "Because")]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in turns]}]))
    ((conversation,),) = prompts_of_file(path).values()
    assert [(m["role"], m["content"]) for m in conversation] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Why?"),
    ]


@pytest.mark.parametrize("entry", ['{"text": "?"}', '{"turns": []}', '["a"]', '{"messages": [{"content": "x"}]}'])
def test_an_unknown_layout_is_refused(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{entry}\n')
    with pytest.raises(ValueError, match="entry 2"):
        prompts_of_file(path)


# --- counting

TREE = TokenTree((1, 2, 3, 4), (-1, 0, 0, 2), (0.0, math.log(0.6), math.log(0.3), math.log(0.5)), (0, 1, 3, 2))


def test_a_step_is_counted_by_depth_rank_and_source() -> None:
    tally = Tally()
    tally.record(TREE, (2, 3), 3, ("a", "b"))
    tally.record(TREE, (), 1, ("a", "b"))
    assert (tally.steps, tally.tokens, tally.accepted, tally.drafted) == (2, 4, 2, 6)
    assert (tally.acceptance_length, tally.nodes_per_step) == (2.0, 3.0)
    assert (tally.tried_at_depth, tally.accepted_at_depth) == ({1: 2, 2: 1}, {1: 1, 2: 1})
    assert (tally.tried_at_rank, tally.accepted_at_rank) == ({0: 3, 1: 2}, {1: 1, 0: 1})
    assert (tally.accepted_of, tally.accepted_of_one) == ({"a": 1, "b": 2}, {"b": 1})
    assert tally.drafted_of == {"a": 4, "b": 4}
    twice = Tally.total([tally, tally])
    assert (twice.steps, twice.rows, twice.accepted_of["b"]) == (4, {4: 4}, 4)


def tally_of(rows: dict[int, int], tokens: int, draft_s: float = 0.0) -> Tally:
    tally = Tally(steps=sum(rows.values()), tokens=tokens, draft_s=draft_s)
    tally.rows.update(rows)
    return tally


def test_speed_follows_from_steps_rows_and_drafting() -> None:
    tally = tally_of({1: 2, 3: 4}, tokens=14, draft_s=0.015)  # 2 x 2 ms + 4 x 4 ms + 15 ms
    assert STEEP.tokens_per_s(tally) == pytest.approx(14 / 0.035)
    assert STEEP.tokens_per_s(tally, with_drafting=False) == pytest.approx(14 / 0.020)
    assert STEEP.speedup(tally) == pytest.approx(14 / 0.035 / 500)
    assert (STEEP.prices.token_us, STEEP.prices.node) == (2000.0, 0.5)


def test_only_nodes_that_pay_are_verified() -> None:
    free = CostTable.read(FLAT_GPU)
    assert "not measured" in free.origin and free.model.step_ms(64) == free.model.step_ms(1)
    assert free.paying(TREE) is TREE
    assert STEEP.paying(TREE).token_ids == (1, 2), "0.6 of a token for half a token's time, 0.3 is too little"


def passes() -> list[Pass]:
    def one(mode: str, name: str, nodes: int, length: int) -> Pass:
        tallies = {
            "chat": tally_of({1: 10}, 10 * length),
            "code": tally_of({1: 10}, 20 * length),
            "chat" + LOOPING: tally_of({1: 10}, 90),
            "file/x": tally_of({1: 10}, 70),
        }
        return Pass(mode, name, nodes, "", tallies)

    return [one(m, name, n, n) for m in MODES for name in ("ngram", "merged") for n in (2, 4)]


def test_figures_are_by_mode_configuration_and_task_at_the_largest_budget() -> None:
    found = report.acceptance(passes(), TASKS, [STEEP])
    assert found["nodes"] == 4 and set(found["acceptance_length"]) == {GREEDY, SAMPLED}
    assert found["acceptance_length"][GREEDY]["merged"] == {"chat": 4.0, "code": 8.0, "file/x": 7.0, "mean": 6.0}
    assert found["uncoupled"]["ngram"]["mean"] == 6.0
    assert found["by_nodes"]["2"][SAMPLED]["ngram"]["acceptance_length"]["mean"] == 3.0
    looping = report.looping(
        {m: [output("chat"), output("chat" + LOOPING), output("code")] for m in (GREEDY, SAMPLED)}, passes(), 4
    )
    assert looping["share"][GREEDY] == {"chat": 0.5, "code": 0.0, "all": pytest.approx(1 / 3)}
    assert looping["acceptance_length"][SAMPLED]["merged"] == 9.0


def output(kind: str, first: int = 5) -> PlainOutput:
    return PlainOutput((first,), (6, 7), kind, 1.0, 3, None)  # type: ignore[arg-type]


def test_live_requests_are_fresh_in_each_round_and_never_twice_in_one() -> None:
    outputs = [output(kind, i) for i in range(3) for kind in ("chat", "code")]
    rounds = [live.requests(outputs, 2, 128, index) for index in (0, 1)]
    assert [(r.task, r.token_ids[0]) for r in rounds[0]] == [("chat", 0), ("code", 0), ("chat", 1), ("code", 1)]
    assert [(r.task, r.token_ids[0]) for r in rounds[1]] == [("chat", 2), ("code", 2), ("chat", 0), ("code", 0)]
    assert {(r.temperature, r.seed, r.max_tokens, r.ignore_eos) for r in rounds[0]} == {(1.0, 3, 128, False)}
    assert len(live.requests(outputs, 9, 128, 0)) == len(outputs)


def test_tasks_take_turns() -> None:
    outputs = [output("a", 1), output("a", 2), output("b", 3)]
    assert [(o.kind, o.prompt_ids[0]) for o in in_turns(outputs)] == [("a", 1), ("b", 3), ("a", 2)]


# --- the whole, on a tiny model


def test_what_is_recorded_is_not_decoded_again(tiny_model: Path, tmp_path: Path) -> None:
    target = RecordedTarget.load(tiny_model, tmp_path)
    recorded = target.record(tmp_path / "kept")

    def no_model() -> Model:
        raise AssertionError("everything is in the cache")

    def again(**changes: object) -> Recorder:
        given = {"vocab_size": target.vocab_size, "eos_token_ids": target.eos, "max_tokens": 40} | changes
        return Recorder(no_model, "tiny", tmp_path / "kept", **given)  # type: ignore[arg-type]

    prompts = [Prompt(o.kind, o.prompt_ids, o.temperature, o.seed) for o in recorded]
    kept = again().record(prompts)
    assert [(o.kind, o.output_ids, o.top_ids.tolist()) for o in kept] == [
        (o.kind, o.output_ids, o.top_ids.tolist()) for o in recorded
    ]
    assert all(o.top_ids[i, 0] == token for o in kept if o.temperature == 0 for i, token in enumerate(o.output_ids))
    with pytest.raises(AssertionError, match="in the cache"):
        again(max_tokens=41).record(prompts)


def test_drafters_that_do_not_exist_are_skipped_and_named(tiny_model: Path, tmp_path: Path) -> None:
    found = find_configurations(
        tiny_model, {"cache_dir": tmp_path}, {}, {"mine": {"ssm_folder": tiny_model, **SSM_FIELDS}}
    )
    names = [c.name for c in found.configurations]
    assert {"ngram", "suffix", "recycling", MERGED, "mine"} <= set(names)
    assert {"ssm", "ssm1", "ssm5"} <= set(found.skipped) and "ssm" in found.skipped["ssm5"]
    merged = next(c for c in found.configurations if c.name == MERGED)
    alone = [name for name in names if name in ("ngram", "suffix", "recycling", "ngram_table")]
    assert merged.sources == tuple(alone)
    assert OUT_OF_THE_BOX not in names, "nothing is shipped for this model: it is the same as all merged"


def test_tables_show_every_pass(tiny_model: Path, tmp_path: Path) -> None:
    target = RecordedTarget.load(tiny_model, tmp_path)
    recorded = target.record(tmp_path)
    greedy, sampled = recorded[:2], recorded[4:6]
    outputs = {GREEDY: in_turns(greedy), SAMPLED: in_turns(sampled), UNCOUPLED: in_turns(sampled)}
    both = [
        Configuration("ngram", ("ngram",)),
        Configuration("the same", ("ngram",)),
        Configuration(MERGED, ("ngram", "ssm"), {"ssm_folder": tiny_model, **SSM_FIELDS}),
    ]
    lines: list[str] = []
    replays = Passes(Target(tiny_model, target.eos), outputs, lines.append)
    done = [*replays.run(both, (4,)), replays.one(GREEDY, both[2], 4, STEEP)]
    costs = [STEEP]
    result = {
        "costs": [{"name": STEEP.name}],
        "skipped": {"head": "it has no [file]"},
        **report.acceptance(done, TASKS, costs),
        "planned": report.planned(done, TASKS, costs),
        "looping": report.looping(outputs, done, 4),
    }
    result["widths"] = report.widths(result)
    lengths = result["acceptance_length"]
    assert lengths[SAMPLED][MERGED]["mean"] > 1.5 * result["uncoupled"][MERGED]["mean"], "the target drafts for itself"
    assert lengths[GREEDY][MERGED]["mean"] > lengths[GREEDY]["ngram"]["mean"]
    assert result["planned"]["steep"][GREEDY][MERGED]["nodes"] < result["by_nodes"]["4"][GREEDY][MERGED]["nodes"]
    json.dumps(result)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    tables.show(result, console)
    shown = console.export_text()
    assert all(text in shown for text in ("greedy: tokens a step", "SpecInfer", "it has no [file]", "that pay"))
    assert lengths[GREEDY]["the same"] == lengths[GREEDY]["ngram"]
    assert len(lines) == len(done) - len(MODES), "what is the same is run once"


def test_the_command_line() -> None:
    options = run.parse_options(["--quick", "--live", "--also", "long=some/folder", "--prompts", "a.jsonl"])
    assert (options.nodes, options.max_tokens, options.live_rounds) == ((8,), 32, 1)
    assert options.also == {"long": Path("some/folder")} and options.prompts == (Path("a.jsonl"),)
    assert run.parse_options([]).nodes == (4, 8, 12, 24) and run.parse_options([]).live_rounds == 0
    for wrong in (["--nodes", "four"], ["--nodes", "0"], ["--also", "long"], ["--ssm-width", "0"]):
        with pytest.raises(SystemExit):
            run.parse_options(wrong)


@pytest.mark.parametrize(("given", "fields"), [([], {}), (["--ssm-width", "1"], {"ssm_width": 1})])
def test_draft_models_are_as_wide_as_asked_for(
    given: list[str], fields: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    found = run.configurations(tiny_model, tmp_path, run.parse_options(given))
    assert found.configurations and all(
        {name: value for name, value in c.fields.items() if name == "ssm_width"} == fields for c in found.configurations
    )
