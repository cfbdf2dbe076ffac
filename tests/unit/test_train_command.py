"""`treeserve train` from a data folder to drafters and a report; following trees along recorded outputs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.training_data import rule_sample, successor, write_rule_data
from typer.testing import CliRunner

from treeserve_cli import main
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.tree import TokenTree
from treeserve_speculator.drafter_files import DrafterFolder, DrafterTarget, open_for_writing
from treeserve_speculator.sequence import DraftSequence
from treeserve_text.tokenizer import Tokenizer
from treeserve_training import train as training
from treeserve_training.config import TrainConfig
from treeserve_training.held_out import Together, follow, together
from treeserve_training.report import Report


@pytest.fixture(autouse=True)
def _signals_and_threads() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def data(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rule_data(tmp_path_factory.mktemp("data"), Tokenizer.from_folder(tiny_model).hash)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _config(tiny_model: Path, data: Path | None, cache: Path, folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": tiny_model, "model_name": "tiny", "data": data, "out": folder / "drafters",
        "work_dir": folder / "work", "cache_dir": cache, "layers": 1, "vocabulary": 220, "sequences": 64, "held_out": 4,
        **changes,
    }  # fmt: skip
    return TrainConfig(**values)


def _quiet() -> Console:
    return Console(quiet=True)


def test_it_leaves_a_drafter_and_a_report(tiny_model: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    config = _config(tiny_model, data, cache, tmp_path, build=("ssm", "ngram_table"))
    assert training.train(config, _quiet())
    held = DrafterFolder.read(config.out_folder)
    assert set(held.sources) == {"ssm", "ngram_table"}
    recipe = held.sources["ssm"].recipe
    assert held.licence == "Apache-2.0" and held.target.name == "tiny"
    assert recipe["trained_on"]["sequences"] == 64 and recipe["data"]["tokens"] == 120 * 20 and recipe["layers"] == 1
    report = json.loads((config.work_folder / "report.json").read_text())
    assert report["acceptance"]["ssm"]["8"]["by_kind"]["rule"]["steps"] > 0
    assert set(report["acceptance"]) == {"ssm", "ngram_table", "all"}
    assert report["agreement"]["ssm"]["rows"] > 0 and len(report["curves"]["ssm"]) == 15
    assert (config.work_folder / "report.png").stat().st_size > 10_000

    # Tuned further, on other data: the same command, from the drafter that is there.
    further = _config(tiny_model, data, cache, tmp_path, start=config.out_folder, work_dir=tmp_path / "b", sequences=8)
    assert training.train(further, _quiet())
    assert DrafterFolder.read(config.out_folder).sources["ssm"].recipe["initialised_from"] == "drafters/drafters"


def test_a_stopped_run_leaves_no_drafter_and_is_gone_on_with(
    tiny_model: Path, data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tiny_model, data, cache, tmp_path, held_out=0)
    seen: list[int] = []

    def on_step(_self: Any, _source: str, _recipe: Any, progress: Any) -> None:
        seen.append(progress.step)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("treeserve_training.display.Display.on_step", on_step)
    assert not training.train(config, _quiet()) and not config.out_folder.exists()
    assert training.train(config, _quiet()) and config.out_folder.exists()
    assert seen == list(range(1, 17))


def test_boosted_drafters_share_the_budget_and_learn_what_is_left(
    tiny_model: Path, data: Path, cache: Path, tmp_path: Path
) -> None:
    config = _config(tiny_model, data, cache, tmp_path, ssms=3, sequences=96)
    assert training.train(config, _quiet())
    held = DrafterFolder.read(config.out_folder)
    assert list(held.sources) == ["ssm", "ssm2", "ssm3"]
    trained = [held.sources[name].recipe["trained_on"] for name in held.sources]
    assert [entry["sequences"] for entry in trained] == [32, 32, 32]
    assert trained[1]["outputs"] <= trained[0]["outputs"]  # of each sequence only what the first gets wrong
    report = json.loads((config.work_folder / "report.json").read_text())
    assert set(report["acceptance"]) == {"ssm", "ssm2", "ssm3", "all"}


def test_data_of_another_tokenizer_are_refused(tiny_model: Path, cache: Path, tmp_path: Path) -> None:
    foreign = write_rule_data(tmp_path / "foreign", "another")
    with pytest.raises(InvalidArgumentError, match="another tokenizer"):
        training.train(_config(tiny_model, foreign, cache, tmp_path), _quiet())
    with pytest.raises(InvalidArgumentError, match="no training data"):
        training.train(_config(tiny_model, tmp_path, cache, tmp_path), _quiet())


def test_prompts_of_a_user_are_answered_first(
    tiny_model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    asked: dict[str, Any] = {}

    def generate(model_folder: Path, out: Path, **options: Any) -> None:
        asked.update(options, out=out)
        write_rule_data(out, Tokenizer.from_folder(model_folder).hash, samples=60)

    monkeypatch.setattr(training, "generate_data", generate)
    config = _config(tiny_model, prompts, cache, tmp_path, sequences=8, tokens=700, held_out=0)
    assert training.train(config, _quiet())
    assert asked["prompts_jsonl"] == prompts and asked["tokens"] == 700
    assert asked["out"].parent == config.work_folder and asked["out"].name.startswith("data-")
    asked.clear()
    assert training.train(config, _quiet()) and not asked  # the data are there


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_arguments: Any, **_options: Any) -> None:
        pytest.fail("begun before the folders were checked")

    for step in ("prepare_checkpoint", "generate_data", "SsmTrainer", "export_ngram_table"):
        monkeypatch.setattr(training, step, made)


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize("option", ["out", "work_dir"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("file", "is not a folder"),
        ("file/below", "cannot be written: Not a directory"),
        ("/proc/nowhere/below", "cannot be written: No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_at_once(
    tiny_model: Path, cache: Path, tmp_path: Path, option: str, path: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(
        main.app,
        ["train", "--model", str(tiny_model), "--cache-dir", str(cache), "--out", str(tmp_path / "a" / "out"),
         "--work-dir", str(tmp_path / "b" / "work"), f"--{option.replace('_', '-')}", str(tmp_path / path)],
    )  # fmt: skip
    assert (ran.exit_code, ran.stdout) == (1, ""), ran.exception
    assert ran.stderr == f"treeserve: {option}: {tmp_path / path} {reason}\n"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write everywhere, so it is somebody else meanwhile."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@pytest.mark.usefixtures("nothing_made")
def test_a_folder_of_somebody_else_is_refused_at_once(
    tiny_model: Path, cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = _config(tiny_model, tmp_path / "data", cache, tmp_path)
    config.out_folder.mkdir(mode=0o555)
    request.getfixturevalue("nobody")
    with pytest.raises(InvalidArgumentError, match=r"^out: .* cannot be written: Permission denied$"):
        training.train(config, _quiet())


@pytest.fixture
def made_up(tiny_model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Of a run whose prompts are made up, which fails the test as soon as they are answered."""
    monkeypatch.setattr(training, "generate_data", lambda *_arguments, **_options: pytest.fail("data were made"))
    return _config(tiny_model, None, cache, tmp_path)


def test_a_folder_with_drafters_of_another_target_is_refused_before_data_are_made(
    made_up: TrainConfig, tmp_path: Path
) -> None:
    (tmp_path / "table").touch()
    other = DrafterTarget("other", "another tokenizer", 300, 48)
    open_for_writing(made_up.out_folder, other, "MIT").with_file("ngram_table", tmp_path / "table", {})
    with pytest.raises(InvalidArgumentError, match="was trained for other"):
        training.train(made_up, _quiet())


def test_a_data_folder_that_cannot_be_filled_is_refused_before_data_are_made(
    made_up: TrainConfig, tmp_path: Path
) -> None:
    made_up.work_folder.mkdir()
    (made_up.work_folder / "data").touch()
    with pytest.raises(InvalidArgumentError, match=r"^work_dir: .*work/data is not a folder$"):
        training.train(made_up, _quiet())


class Scripted:
    """Drafts by the rule for some levels, behind so many wrong siblings of higher rank."""

    wants_top_tokens = False

    def __init__(self, depth: int, wrong: int = 0, name: str = "scripted") -> None:
        self.name, self.depth, self.wrong = name, depth, wrong

    def open(self, state: DraftSequence) -> None:
        assert state.handle not in state.source_state
        state.source_state[self.name] = True

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        assert state.tokens[-len(new_tokens) :] == list(new_tokens)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        tokens, parents, log_probs, node = [state.tokens[-1]], [-1], [0.0], 0
        for _ in range(self.depth):
            for i in range(self.wrong):
                tokens, parents, log_probs = [*tokens, 290 + i], [*parents, node], [*log_probs, math.log(0.3)]
            tokens, parents = [*tokens, successor(tokens[node])], [*parents, node]
            log_probs.append(math.log(0.2))
            node = len(tokens) - 1
        return TokenTree(tuple(tokens), tuple(parents), tuple(log_probs))

    def close(self, state: DraftSequence) -> None:
        del state.source_state[self.name]


def test_trees_are_followed_along_recorded_outputs() -> None:
    rng = np.random.default_rng(0)
    samples = [rule_sample(rng, outputs=12), rule_sample(rng, outputs=12, temperature=1.0)]
    tallies = follow(Scripted(depth=2), samples, 24)
    assert set(tallies) == {"rule"}  # the sampled one was drawn with noise that no drafter knows
    tally = tallies["rule"]
    assert (tally.steps, tally.tokens, tally.nodes) == (4, 12, 8)
    assert tally.acceptance_length == 3.0 and tally.by_depth() == {1: 1.0, 2: 1.0} and tally.by_rank() == {1: 1.0}
    assert together([tally, tally]).steps == 8 and together([]).steps == 0

    second = follow(Scripted(depth=2, wrong=1), samples, 24)["rule"]
    assert second.by_rank() == {2: 1.0} and second.acceptance_length == 3.0
    pruned = follow(Scripted(depth=2, wrong=1), samples, 1)["rule"]  # of the budget's one node: the wrong one
    assert pruned.acceptance_length == 1.0 and pruned.by_depth() == {1: 0.0}
    both = follow(Together([Scripted(1, name="a"), Scripted(2, name="b")]), samples, 24)["rule"]
    assert both.acceptance_length == 3.0 and both.nodes == 8


def test_a_report_is_written_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeserve_training.report.find_spec", lambda _name: None)
    report = Report({"seed": 1}, {"tokens": 2})
    report.trees["ssm"] = {4: follow(Scripted(2), [rule_sample(np.random.default_rng(0))], 4)}
    assert report.write(tmp_path) == [tmp_path / "report.json"]
    assert "ssm, 4 nodes: greedy acceptance length" in "\n".join(report.lines())


def test_the_command_reads_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainConfig] = []

    def run(config: TrainConfig, _console: Console) -> bool:
        asked.append(config)
        if config.seed == 2:
            raise InvalidArgumentError("data", "is bad")
        return config.seed == 0

    monkeypatch.setattr(training, "train", run)
    monkeypatch.setenv("TREESERVE_CACHE", str(tmp_path))
    (tmp_path / "SmolLM2-135M-Instruct.gguf").touch()

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(main.app, ["train", *arguments])

    assert invoke("--ssms", "5", "--build", "ssm").exit_code == 0
    assert asked[0].ssms == 5 and asked[0].cache_dir == tmp_path
    assert asked[0].target == tmp_path / "SmolLM2-135M-Instruct.gguf" and asked[0].name == "SmolLM2-135M-Instruct"
    assert invoke("--model", "some/folder", "--seed", "1").exit_code == 3
    assert asked[1].out_folder == Path("drafters/folder") and asked[1].work_folder == tmp_path / "drafting" / "folder"
    (tmp_path / "train.yaml").write_text("cache_dir: of-the-file")
    assert invoke("--model", "some/folder", "--config", str(tmp_path / "train.yaml")).exit_code == 0
    assert asked[2].cache_dir == Path("of-the-file")
    failed = invoke("--seed", "2")
    assert failed.exit_code == 1 and "data: is bad" in failed.stderr
    for wrong in (["--ssms", "6"], ["--build", "magic"], ["--hard-weight", "2"], ["--epochs", "0"], ["stray"]):
        assert invoke(*wrong).exit_code == 2
    assert len(asked) == 4


def test_the_help_says_what_each_option_does_and_its_default() -> None:
    shown = CliRunner().invoke(main.app, ["train", "--help"], env={"COLUMNS": "500"})
    assert shown.exit_code == 0
    options = dict(re.findall(r"^  --([a-z-]+) \S+\s+(.+)$", shown.stdout.partition("options:")[2], re.MULTILINE))
    assert {"config", *(name.name.replace("_", "-") for name in fields(TrainConfig))} == set(options)
    for name, text in options.items():
        assert re.fullmatch(r"\S.{14,} \(default: (?!none).+\)", text), (name, text)
    assert "in place of --epochs" in options["sequences"] and "0 goes by --epochs" in options["sequences"]
    assert "(default: drafters/MODEL_NAME)" in options["out"]
    assert "TREESERVE_TRAIN_MODEL" in options["config"]
