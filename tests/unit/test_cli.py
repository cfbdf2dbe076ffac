"""The `treeserve` command with a client that answers from a script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treeserve_cli import __main__ as entry
from treeserve_cli import generate, main, models, up
from treeserve_cli.cluster import ClusterError
from treeserve_client import (
    Chunk,
    Completion,
    Model,
    NotFound,
    SpeculationStats,
    Timing,
    Unavailable,
    Usage,
)

COMPLETION = Completion(
    token_ids=(1, 2, 3),
    text="héllo\n",
    log_probs=(),
    finish_reason="length",
    stop_string=None,
    usage=Usage(4, 3),
    speculation=SpeculationStats(2, 8, 1, (1,)),
    timing=Timing(10.0, 5.0, 20.0),
    request_id="r-7",
)


class FakeClient:
    """Remembers what it was asked; raises `error` if set."""

    address: str
    params: dict[str, Any]
    error: Exception | None = None

    def __init__(self, address: str) -> None:
        type(self).address = address

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def generate(self, **params: Any) -> FakeStream:
        type(self).params = {name: value for name, value in params.items() if value is not None}
        return FakeStream(self.error)

    def list_models(self) -> list[Model]:
        if self.error:
            raise self.error
        return [Model("some-model", "ab", 300, (2,), 2048, 2, "float32")]


class FakeStream:
    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.result = COMPLETION

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def __iter__(self) -> Iterator[Chunk]:
        yield Chunk(0, (1,), "hé")
        if self._error:
            raise self._error
        yield Chunk(1, (2, 3), "llo\n")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    class Fresh(FakeClient):
        pass

    for command in (generate, models):
        monkeypatch.setattr(command, "Client", Fresh)
    return Fresh


def invoke(*args: str) -> Any:
    return CliRunner().invoke(main.app, list(args))


def test_generate_streams_text(client: type[FakeClient]) -> None:
    result = invoke("generate", "--prompt", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "héllo\n\n", "")
    assert client.params == {"prompt": "hi", "temperature": 0.0, "speculation": True, "acceptance": "replay"}
    assert client.address == "localhost:50051"


def test_generate_passes_its_options_on(client: type[FakeClient]) -> None:
    result = invoke(
        "generate", "--prompt", "hi", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5",
        "--seed", "18446744073709551615", "--stop", "a", "--stop", "b,c", "--no-speculation", "--address", "unix:/x",
    )  # fmt: skip
    assert result.exit_code == 0
    assert client.params == {
        "prompt": "hi", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 2**64 - 1,
        "stop": ["a", "b,c"], "speculation": False, "acceptance": "replay",
    }  # fmt: skip
    assert client.address == "unix:/x"


def test_a_preset_is_passed_on_and_an_unknown_one_refused(client: type[FakeClient]) -> None:
    assert invoke("generate", "--prompt", "hi", "--preset", "code").exit_code == 0
    assert client.params["preset"] == "code"
    assert invoke("generate", "--prompt", "hi", "--preset", "poem").exit_code == 2


def test_what_the_output_must_be_is_passed_on(client: type[FakeClient], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert invoke("generate", "--prompt", "hi", "--json-schema", str(tmp_path / "schema.json")).exit_code == 0
    assert client.params["json_schema"] == '{"type": "object"}'
    assert invoke("generate", "--prompt", "hi", "--regex", "a+", "--choice", "a", "--choice", "b").exit_code == 0
    assert (client.params["regex"], client.params["choice"]) == ("a+", ["a", "b"])
    assert invoke("generate", "--prompt", "hi", "--json-schema", str(tmp_path / "none.json")).exit_code == 2


def test_chat_sends_messages(client: type[FakeClient]) -> None:
    invoke("generate", "--prompt", "hi", "--chat")
    assert client.params["messages"] == [{"role": "user", "content": "hi"}]
    invoke("generate", "--prompt", "hi", "--system", "be brief")
    system = {"role": "system", "content": "be brief"}
    assert client.params["messages"] == [system, {"role": "user", "content": "hi"}]
    assert "prompt" not in client.params


def test_json_prints_one_object_and_no_stream(client: type[FakeClient]) -> None:
    result = invoke("generate", "--prompt", "hi", "--json")
    assert json.loads(result.stdout) == {
        "token_ids": [1, 2, 3],
        "text": "héllo\n",
        "finish_reason": "length",
        "request_id": "r-7",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
        "speculation": {
            "steps": 2,
            "drafted": 8,
            "accepted": 1,
            "acceptance_length": 1.5,
            "acceptance": "replay",
            "lossy": False,
        },
        "timing": {"ttft_ms": 10.0, "tpot_ms": 5.0, "e2e_ms": 20.0},
    }


def test_an_acceptance_rule_is_passed_on_and_a_lossy_one_is_told(
    client: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = replace(COMPLETION, speculation=SpeculationStats(2, 8, 1, (1,), "typical", True))
    monkeypatch.setattr("test_cli.COMPLETION", lossy)
    options = ["--acceptance", "typical", "--typical-epsilon", "0.2", "--typical-delta", "0.5"]
    result = invoke("generate", "--prompt", "hi", *options)
    assert client.params["acceptance"] == "typical"
    assert (client.params["typical_epsilon"], client.params["typical_delta"]) == (0.2, 0.5)
    assert result.stdout == "héllo\n\n" and "LOSSY: accepted by typical" in result.stderr
    result = invoke("generate", "--prompt", "hi", "--json", *options)
    assert json.loads(result.stdout)["speculation"]["lossy"] is True and "LOSSY" in result.stderr


def test_an_error_ends_with_1_and_goes_to_stderr(client: type[FakeClient]) -> None:
    client.error = Unavailable("no verifier")
    result = invoke("generate", "--prompt", "hi")
    assert (result.exit_code, result.stdout) == (1, "hé\n")
    assert result.stderr.startswith("treeserve: no verifier (is `treeserve up` running")
    assert invoke("generate", "--prompt", "hi", "--json").stdout == ""
    client.error = NotFound("gone")
    assert invoke("models").exit_code == 1


@pytest.mark.parametrize(
    "args",
    [
        ["generate"],
        ["generate", "--prompt", "a", "--top-k", "x"],
        ["generate", "--prompt", "a", "--max-tokens", "0"],
        ["generate", "--prompt", "a", "--acceptance", "hopeful"],
        ["nonsense"],
    ],
)
def test_wrong_usage_ends_with_2(args: list[str]) -> None:
    assert invoke(*args).exit_code == 2


def test_models_prints_a_table(client: type[FakeClient]) -> None:
    cells = invoke("models").stdout.split()
    assert {"some-model", "2048", "float32", "2", "300"} <= set(cells)


class FakeCluster:
    """Stands for LocalCluster; remembers its configuration."""

    config: Any
    stopped = False
    error: Exception | None = None

    def __init__(self, config: Any, report: Any) -> None:
        type(self).config = config
        self.grpc_address, self.http_address = "127.0.0.1:1", "127.0.0.1:2"

    def __enter__(self) -> FakeCluster:
        if self.error:
            raise self.error
        return self

    def __exit__(self, *_exc: object) -> None:
        type(self).stopped = True

    def client(self) -> FakeClient:
        return FakeClient(self.grpc_address)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeCluster]]:
    class Fresh(FakeCluster):
        pass

    def interrupt() -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(up, "LocalCluster", Fresh)
    monkeypatch.setattr(up, "_until_interrupted", interrupt)
    monkeypatch.setattr(up, "run_demo", lambda *_args: interrupt())
    before = signal.signal(signal.SIGTERM, lambda *_args: pytest.fail("SIGTERM has no handler"))
    yield Fresh
    signal.signal(signal.SIGTERM, before)


def test_up_says_when_it_is_ready_and_stops_on_sigterm(cluster: type[FakeCluster]) -> None:
    result = invoke("up", "--verifiers", "2", "--sources", "ngram,suffix", "--no-redis", "--grpc-port", "0")
    assert (result.exit_code, result.stdout) == (0, "ready grpc=127.0.0.1:1 http=127.0.0.1:2\n")
    assert cluster.stopped
    config = cluster.config
    assert (config.verifiers, config.sources, config.no_redis) == (2, ("ngram", "suffix"), True)


def test_demo_takes_free_ports_and_stops_on_sigterm(cluster: type[FakeCluster]) -> None:
    assert invoke("demo", "--threads", "3").exit_code == 0
    assert cluster.stopped
    assert (cluster.config.grpc_port, cluster.config.http_port, cluster.config.threads) == (0, 0, 3)
    invoke("demo", "--http-port", "7000")
    assert cluster.config.http_port == 7000


def test_up_reads_its_cache_and_options_from_the_environment(
    cluster: type[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREESERVE_CACHE", "some/cache")
    monkeypatch.setenv("TREESERVE_UP_THREADS", "3")
    monkeypatch.setenv("TREESERVE_VERIFIERS", "unix:x")  # a router's, not ours
    invoke("up")
    assert (str(cluster.config.cache_dir), cluster.config.threads, cluster.config.verifiers) == ("some/cache", 3, 1)
    invoke("up", "--cache-dir", "other")
    assert str(cluster.config.cache_dir) == "other"


@pytest.mark.parametrize("error", [ClusterError("verifier-0 exited with 1"), PermissionError(13, "no", "a/folder")])
def test_up_explains_why_it_cannot_start(cluster: type[FakeCluster], error: Exception) -> None:
    cluster.error = error
    result = invoke("up")
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(error) in result.stderr


@pytest.mark.parametrize("args", [["--verifiers", "0"], ["--verifiers", "x"], ["--unknown"], ["stray"]])
def test_up_refuses_wrong_usage(cluster: type[FakeCluster], args: list[str]) -> None:
    assert invoke("up", *args).exit_code == 2
    assert not hasattr(cluster, "config")


def help_of(command: str) -> str:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    return " ".join(result.stdout.split())


def test_up_help_lists_the_options() -> None:
    text = help_of("up")
    assert "--kv-tokens" in text and "Serve a model on this machine" in text


@pytest.mark.parametrize("command", ["up", "demo", "train"])
def test_help_tells_the_cache_that_would_be_used(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREESERVE_CACHE", "my-cache")
    assert "where converted models are kept ($TREESERVE_CACHE) (default: my-cache)" in help_of(command)


def test_demo_help_is_its_own() -> None:
    text = help_of("demo")
    assert "--kv-tokens" in text and "measure speculation" in text and "Serve a model" not in text
    assert text.count("0 picks one (default: 0)") == 2


@pytest.mark.parametrize(
    "command", [["corpus", "build", "texts", "--out", "file"], ["simulate", "calibrate", "--out", "file"], ["train"]]
)
@pytest.mark.parametrize("named", [True, False])
def test_a_default_model_that_nobody_fetched_is_explained(
    command: list[str], named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREESERVE_CACHE", str(tmp_path / "treeserve") if named else "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = invoke(*command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no default model at {tmp_path}/treeserve/" in result.stderr and "`make setup` fetches it" in result.stderr


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"treeserve {version('treeserve')}\n")


def test_ctrl_c_while_the_command_loads_is_quiet() -> None:
    script = """
import signal, sys
class Interrupts:
    def find_spec(self, name, *_args):
        if name == "treeserve_cli.main":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from treeserve_cli.__main__ import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, b"", b"")


def test_ctrl_c_is_the_command_s_own_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["treeserve", "--version"])
    with pytest.raises(SystemExit):
        entry.main()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_another_thread_took_ends_the_wait() -> None:
    script = """
import signal, threading, time
from treeserve_cli.up import _until_interrupted
signal.signal(signal.SIGTERM, signal.default_int_handler)
other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
other.start()
threading.Timer(0.5, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
try:
    _until_interrupted()
except KeyboardInterrupt:
    print("ended")
"""
    ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=30, check=True)
    assert ran.stdout == b"ended\n"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_schema_that_cannot_be_read_is_named(client: type[FakeClient], tmp_path: Path, content: bytes | None) -> None:
    schema = tmp_path / "schema.json"
    if content is not None:
        schema.write_bytes(content)
    result = invoke("generate", "--prompt", "x", "--json-schema", str(schema))
    assert result.exit_code != 0 and "schema.json" in result.stderr and not isinstance(result.exception, ValueError)


def test_a_corpus_that_cannot_be_written_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeserve_engine.checkpoint.prepare_checkpoint", lambda *args: pytest.fail("it was begun"))
    out = tmp_path / "no such folder" / "my.corpus"
    result = CliRunner().invoke(main.app, ["corpus", "build", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 1 and "no such folder" in result.stderr
