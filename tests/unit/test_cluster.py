"""The local cluster: its command lines fit the services' configurations, and failures to start are explained."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from treeserve_cli import cluster as cluster_module
from treeserve_cli.cluster import ClusterError, LocalCluster
from treeserve_cli.layout import ClusterConfig, Layout, process_specs
from treeserve_cli.supervisor import ProcessSpec, Supervisor
from treeserve_core.errors import InvalidArgumentError
from treeserve_router.config import RouterConfig
from treeserve_speculator.config import SpeculatorConfig
from treeserve_verifier.config import VerifierConfig
from treeserve_wire.config import load_config
from treeserve_wire.tls import TlsFiles

LAYOUT = Layout(Path("run"), Path("models/m"), ("127.0.0.1:1",), ("127.0.0.1:2",))


def by_name(config: ClusterConfig) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in process_specs(config, LAYOUT)}


def flags_of(spec: ProcessSpec) -> list[str]:
    assert spec.command[:3] == (sys.executable, "-m", f"treeserve_{spec.role}")
    return list(spec.command[3:])


def test_start_order() -> None:
    names = list(by_name(ClusterConfig(verifiers=2, speculators=2)))
    assert names == ["valkey-0", "verifier-0", "verifier-1", "speculator-0", "speculator-1", "router-0"]


def test_flags_fit_the_verifier() -> None:
    specs = by_name(ClusterConfig(model_name="m", verifiers=2, dtype="bfloat16", threads=3, kv_tokens=8192, drain_s=2))
    config = load_config(VerifierConfig, flags_of(specs["verifier-1"]), {})
    assert (config.model_folder, config.model_name) == (Path("models/m"), "m")
    assert (config.listen, config.verifier_id) == ("unix:run/verifier-1.sock", "verifier-1")
    assert (config.dtype, config.threads, config.kv_tokens, config.drain_s) == ("bfloat16", 3, 8192, 2.0)
    assert specs["verifier-1"].stop_timeout_s > config.drain_s
    config = load_config(VerifierConfig, flags_of(by_name(ClusterConfig(cache_dir=Path("here")))["verifier-0"]), {})
    assert (config.dtype, config.kv_dtype, config.cache_dir) == ("auto", "auto", Path("here"))


def test_flags_fit_the_speculator() -> None:
    config = ClusterConfig(model_name="m", verifiers=2, sources=("ngram",), drafter=Path("ssm"))
    speculator = load_config(SpeculatorConfig, flags_of(by_name(config)["speculator-0"]), {})
    assert speculator.verifiers == ("unix:run/verifier-0.sock", "unix:run/verifier-1.sock")
    assert (speculator.sources, speculator.ssm_folder) == (("ngram",), Path("ssm"))
    plain = load_config(SpeculatorConfig, flags_of(by_name(ClusterConfig())["speculator-0"]), {})
    assert plain.ssm_folder is None


def test_flags_fit_the_router() -> None:
    router = load_config(RouterConfig, flags_of(by_name(ClusterConfig(model_name="m"))["router-0"]), {})
    assert (router.listen, router.http_listen) == ("127.0.0.1:1", "127.0.0.1:2")
    assert router.verifiers == ("unix:run/verifier-0.sock",)
    assert router.redis_url == "unix://run/valkey-0.sock"


def test_each_router_has_addresses_of_its_own() -> None:
    cluster = LocalCluster(ClusterConfig(routers=3, grpc_port=7000, http_port=0))
    assert cluster.grpc_address == "127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002"
    assert len(set(cluster.http_addresses)) == 3
    layout = Layout(Path("run"), Path("models/m"), cluster.grpc_addresses, cluster.http_addresses)
    specs = process_specs(cluster.config, layout)
    routers = [load_config(RouterConfig, flags_of(spec), {}) for spec in specs if spec.role == "router"]
    assert tuple(router.listen for router in routers) == cluster.grpc_addresses
    assert tuple(router.http_listen for router in routers) == cluster.http_addresses
    assert [router.router_id for router in routers] == ["router-0", "router-1", "router-2"]


def test_without_redis_nobody_looks_for_it() -> None:
    specs = by_name(ClusterConfig(no_redis=True))
    assert "valkey-0" not in specs
    assert load_config(RouterConfig, flags_of(specs["router-0"]), {}).redis_url is None


def test_settings_reach_their_role_and_win() -> None:
    config = ClusterConfig(settings=("verifier.draft_wait_ms=5", "verifier.threads=1", "router.router_id=a=b"))
    specs = by_name(config)
    verifier = load_config(VerifierConfig, flags_of(specs["verifier-0"]), {})
    assert (verifier.draft_wait_ms, verifier.threads) == (5.0, 1)
    assert load_config(RouterConfig, flags_of(specs["router-0"]), {}).router_id == "a=b"
    load_config(SpeculatorConfig, flags_of(specs["speculator-0"]), {})


@pytest.mark.parametrize("setting", ["verifier", "verifier.threads", "valkey.save=1", "threads=1"])
def test_malformed_settings_are_refused(setting: str) -> None:
    with pytest.raises(InvalidArgumentError, match="settings"):
        ClusterConfig(settings=(setting,))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ClusterConfig(), "SmolLM2-135M-Instruct"),
        (ClusterConfig(model=Path("a/Some.Model-1.5B")), "Some.Model-1.5B"),
        (ClusterConfig(model=Path("a/m.gguf")), "m"),
        (ClusterConfig(model=Path("a/m.gguf"), model_name="named"), "named"),
    ],
)
def test_served_name(config: ClusterConfig, name: str) -> None:
    assert config.served_name == name


def test_a_default_model_that_nobody_fetched_is_explained(tmp_path: Path) -> None:
    config = ClusterConfig(cache_dir=tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"no default model at .*`make setup`.*TREESERVE_CACHE"):
        _ = config.model_source
    (tmp_path / "SmolLM2-135M-Instruct.gguf").touch()
    assert config.model_source == tmp_path / "SmolLM2-135M-Instruct.gguf"


def broken_cluster(
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    config: ClusterConfig,
    report: Callable[[str], None] = lambda _line: None,
) -> LocalCluster:
    """A cluster whose only process is a shell script."""

    def specs(_config: ClusterConfig, layout: Layout) -> list[ProcessSpec]:
        return [ProcessSpec("router", 0, ("sh", "-c", script), layout.log("router", 0), 5.0)]

    monkeypatch.setattr(cluster_module, "process_specs", specs)
    monkeypatch.setattr(LocalCluster, "_prepare_model", lambda _self: Path("m"))
    return LocalCluster(config, report)


def test_a_process_that_exits_fails_the_start_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ClusterConfig(grpc_port=0, http_port=0, run_dir=tmp_path / "run")
    cluster = broken_cluster(monkeypatch, "echo no such tensor; exit 3", config)
    with pytest.raises(ClusterError, match=r"(?s)router-0 exited with 3:.*no such tensor"):
        cluster.start()
    assert not cluster.processes["router"][0].is_running
    assert (tmp_path / "run").is_dir()


def test_nothing_is_restarted_before_the_cluster_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines: list[str] = []
    config = ClusterConfig(grpc_port=0, http_port=0, run_dir=tmp_path)
    with pytest.raises(ClusterError):
        broken_cluster(monkeypatch, "exit 3", config, lines.append).start()
    assert lines[1].startswith("router-0 exited with 3, not restarted")
    monkeypatch.setattr(LocalCluster, "_wait_ready", lambda *_args: None)
    with broken_cluster(monkeypatch, "sleep 60", config) as cluster:
        cluster.kill("router")
        until = time.monotonic() + 10
        while not cluster.processes["router"][0].restarts:
            assert time.monotonic() < until, "was not restarted"
            time.sleep(0.02)


def test_an_interrupted_start_leaves_no_folder_and_a_failed_one_its_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    error: BaseException = KeyboardInterrupt()

    def wait(*_args: object) -> None:
        raise error

    monkeypatch.setattr(LocalCluster, "_wait_ready", wait)
    config = ClusterConfig(grpc_port=0, http_port=0)
    for error, logs in ((KeyboardInterrupt(), False), (ClusterError("not ready"), True)):
        cluster = broken_cluster(monkeypatch, "sleep 60", config)
        with pytest.raises(type(error)):
            cluster.start()
        assert not cluster.processes["router"][0].is_running
        assert (cluster.run_dir.parent, cluster.run_dir.exists()) == (tmp_path, logs)


def test_a_stop_that_is_interrupted_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop = Supervisor.stop

    def interrupted(supervisor: Supervisor) -> None:
        stop(supervisor)
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(LocalCluster, "_wait_ready", lambda *_args: None)
    monkeypatch.setattr(Supervisor, "stop", interrupted)
    cluster = broken_cluster(monkeypatch, "sleep 60", ClusterConfig(grpc_port=0, http_port=0))
    cluster.start()
    assert cluster.run_dir.exists()
    with pytest.raises(KeyboardInterrupt):
        cluster.stop()
    assert not cluster.run_dir.exists()


def test_a_start_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ClusterConfig(grpc_port=0, http_port=0, run_dir=tmp_path, ready_timeout_s=0.2)
    cluster = broken_cluster(monkeypatch, "sleep 60", config)
    with pytest.raises(ClusterError, match=r"not ready after 0\.2 s"):
        cluster.start()
    assert not cluster.processes["router"][0].is_running


def test_a_taken_port_fails_the_start_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for ports in ({"grpc_port": port, "http_port": 0}, {"grpc_port": 0, "http_port": port}):
            cluster = broken_cluster(monkeypatch, "sleep 60", ClusterConfig(run_dir=tmp_path, **ports))
            with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{port}"):
                cluster.start()
            assert cluster.processes["router"] == ()


@pytest.mark.parametrize(
    "ports",
    [
        {"grpc_port": 7000, "http_port": 7000},
        {"grpc_port": 7000, "http_port": 7001, "routers": 2},
        {"grpc_port": 7002, "http_port": 7000, "routers": 3},
    ],
)
def test_ports_that_overlap_are_refused(ports: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="overlap"):
        ClusterConfig(**ports)


def test_ports_side_by_side_are_fine() -> None:
    ClusterConfig(routers=2, grpc_port=7000, http_port=7002)
    ClusterConfig(routers=2, grpc_port=0, http_port=0)


def test_a_tls_file_that_is_missing_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tls = TlsFiles(*(tmp_path / name for name in ("tls.crt", "tls.key", "nope.crt")))
    for present in (tls.cert_file, tls.key_file):
        present.touch()
    config = ClusterConfig(grpc_port=0, http_port=0, run_dir=tmp_path / "run", tls=tls)
    cluster = broken_cluster(monkeypatch, "sleep 60", config)
    with pytest.raises(InvalidArgumentError, match=r"tls\.ca_file: .*nope\.crt: No such file"):
        cluster.start()
    assert cluster.processes["router"] == () and not cluster.run_dir.exists()


@pytest.mark.parametrize("ports", [{"grpc_port": 65536}, {"http_port": -1}, {"grpc_port": 65535, "routers": 2}])
def test_a_number_that_is_no_port_is_refused(ports: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="port"):
        ClusterConfig(**ports)


def test_a_relative_run_directory_is_the_same_for_processes_that_change_theirs() -> None:
    assert LocalCluster(ClusterConfig(run_dir=Path("run"))).run_dir == Path.cwd() / "run"


def test_no_processes_before_the_start() -> None:
    cluster = LocalCluster(ClusterConfig(grpc_port=0, http_port=0))
    assert cluster.processes == {"valkey": (), "verifier": (), "speculator": (), "router": ()}
    cluster.stop()
    assert not cluster.run_dir.exists()
