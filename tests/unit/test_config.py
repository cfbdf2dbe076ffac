"""Configuration from defaults, file, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.config import ConfigError, load_config, option


@dataclass(frozen=True)
class _Config:
    """A service under test."""

    model_folder: Path = field(metadata={"help": "where the model lies"})
    listen: str = "127.0.0.1:1"
    threads: int = 2
    wait_ms: float = 1.5
    redis: bool = True
    sources: tuple[str, ...] = ("ngram",)
    redis_url: str | None = None
    max_nodes: int | None = 8

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError("threads must be at least 1")
        if self.wait_ms < 0:
            raise InvalidArgumentError("wait_ms", "is negative")


REQUIRED = ["--model-folder", "m"]


def test_defaults() -> None:
    assert load_config(_Config, REQUIRED, {}) == _Config(Path("m"))


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model_folder: from-file\nlisten: from-file\nthreads: 3\nwait_ms: 2\nredis: false\nsources: [a, b]\n"
    )
    environ = {"TREESERVE_LISTEN": "from-env", "TREESERVE_THREADS": "4", "OTHER": "x"}
    config = load_config(_Config, ["--config", str(file), "--threads", "5"], environ)
    assert config == _Config(Path("from-file"), "from-env", 5, 2.0, False, ("a", "b"))
    assert load_config(_Config, [], environ | {"TREESERVE_CONFIG": str(file)}).threads == 4


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--sources", "a,b"], "sources", ("a", "b")),
        (["--sources", "a", "--sources", "b, c"], "sources", ("a", "b", "c")),
        (["--sources", ""], "sources", ()),
        (["--redis", "false"], "redis", False),
        (["--redis"], "redis", True),
        (["--redis-url", "unix:x"], "redis_url", "unix:x"),
        (["--redis-url", ""], "redis_url", None),
        (["--max-nodes", ""], "max_nodes", None),
        (["--max-nodes", "3"], "max_nodes", 3),
        (["--listen", ""], "listen", ""),
    ],
)
def test_values_from_text(argv: list[str], name: str, value: object) -> None:
    assert getattr(load_config(_Config, [*REQUIRED, *argv], {}), name) == value


def test_an_empty_list_in_the_environment_overrides() -> None:
    assert load_config(_Config, REQUIRED, {"TREESERVE_SOURCES": ""}).sources == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model_folder: m\nthread: 3\n", "unknown keys thread; known are"),
        ("model_folder: m\nthreads: many\n", "threads: invalid literal"),
        ("model_folder: m\nthreads: 2.5\n", "expected int, not 2.5"),
        ("model_folder: m\nthreads: true\n", "expected int, not True"),
        ("model_folder: m\nredis: perhaps\n", "expected true or false"),
        ("model_folder: m\nsources: {a: b}\n", "expected a list of strings"),
        ("model_folder: m\nsources: [1]\n", "expected a list of strings"),
        ("model_folder: [m]\n", "expected Path"),
        ("- a\n", "expected a mapping"),
        ("a: [\n", "while parsing"),
        ("listen: x\n", "missing: --model-folder"),
        ("model_folder: m\nthreads: 0\n", "threads must be at least 1"),
        ("model_folder: m\nwait_ms: -1\n", "wait_ms: is negative"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(_Config, ["--config", str(file)], {})


def test_errors_name_their_source() -> None:
    with pytest.raises(ConfigError, match="TREESERVE_THREADS: invalid"):
        load_config(_Config, REQUIRED, {"TREESERVE_THREADS": "x"})
    with pytest.raises(ConfigError, match="--wait-ms: could not"):
        load_config(_Config, [*REQUIRED, "--wait-ms", "x"], {})
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(_Config, [*REQUIRED, "--config", "none.yaml"], {})


@pytest.mark.parametrize("argv", [["--unknown", "1"], ["--thread", "1"]])
def test_unknown_flags_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(_Config, [*REQUIRED, *argv], {})


def test_help_shows_fields_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(_Config, ["--help"], {})
    text = capsys.readouterr().out
    assert "where the model lies (required)" in text
    assert "(default: 127.0.0.1:1)" in text
    assert "(default: none)" in text
    assert "TREESERVE_MODEL_FOLDER" in text


def test_help_says_a_default_in_words_where_its_value_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Named:
        folder: str | None = field(default=None, metadata=option("where", default="the newest"))

    with pytest.raises(SystemExit):
        load_config(Named, ["--help"], {})
    assert "where (default: the newest)" in capsys.readouterr().out


def test_an_unsupported_field_type_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Bad:
        items: dict[str, str] = field(default_factory=dict)

    with pytest.raises(TypeError, match="unsupported"):
        load_config(Bad, [], {})
