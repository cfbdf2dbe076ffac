"""The file of API keys, `treeserve keys new`, and how commands bring keys and certificates to a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from treeserve_cli import main
from treeserve_cli.cluster import ClusterError, LocalCluster
from treeserve_cli.layout import ClusterConfig, Layout, process_specs
from treeserve_client import TLS, Unauthenticated
from treeserve_core.errors import InvalidArgumentError
from treeserve_router.auth import ApiKey, Keyring, digest_of, file_line, new_key
from treeserve_router.config import RouterConfig
from treeserve_speculator.config import SpeculatorConfig
from treeserve_verifier.config import VerifierConfig
from treeserve_wire.config import load_config
from treeserve_wire.tls import TlsFiles

KEY = "tsk_a-key-that-must-not-be-repeated"
DIGEST = digest_of(KEY)


def test_a_key_is_known_by_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"# CI\n- {{sha256: {DIGEST}, tenant: acme, trusted: true}}\n")
    keyring = Keyring(file)
    assert keyring.find(KEY) == ApiKey(DIGEST, "acme", trusted=True, name=DIGEST[:8])
    assert (
        keyring.find(DIGEST) is keyring.find("") is keyring.find("é\ud800".encode("utf-8", "ignore").decode()) is None
    )
    file.write_text("[]\n")
    keyring.refresh()
    assert keyring.find(KEY) is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no list"),
        (f"{KEY}: acme", "no list"),
        (f"- {{sha256: {KEY}", "not YAML at line"),
        (b"\xff\xfe\xfa", "not YAML"),
        (f"- {KEY}", "key 1: is no mapping"),
        (f"- {{sha256: {DIGEST}, tenant: a}}\n- {{{KEY}: x}}", "key 2: is no mapping of sha256, tenant, trusted, name"),
        (f"- {{sha256: {KEY}, tenant: a}}", "key 1: sha256 is not 64"),
        (f"- {{sha256: {DIGEST}}}", "key 1: tenant is missing"),
        (f"- {{sha256: {DIGEST}, tenant: ''}}", "key 1: tenant is missing"),
        (f"- {{sha256: {DIGEST}, tenant: {'a' * 129}}}", "key 1: tenant has more than 128 characters"),
        (f"- {{sha256: {DIGEST}, tenant: 7}}", "key 1: tenant is no str"),
        (f"- {{sha256: {DIGEST}, tenant: a, trusted: maybe}}", "key 1: trusted is no bool"),
        (f"- {{sha256: {DIGEST}, tenant: a}}\n- {{sha256: {DIGEST}, tenant: b}}", "key 2: its sha256 is an earlier"),
    ],
)
def test_a_malformed_file_is_refused_without_repeating_it(tmp_path: Path, content: str | bytes, named: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidArgumentError) as raised:
        Keyring(file)
    assert str(raised.value).startswith(f"api_keys_file: {file}: ")
    assert named in str(raised.value)
    assert KEY not in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="nowhere: No such file"):
        Keyring(tmp_path / "nowhere")


def test_who_is_trusted_is_said_in_one_place() -> None:
    with pytest.raises(InvalidArgumentError, match="trust_clients"):
        RouterConfig(Path("m"), "m", api_keys_file=Path("k"), trust_clients=True)
    with pytest.raises(InvalidArgumentError, match="require_client_certs"):
        RouterConfig(Path("m"), "m", require_client_certs=True)


# --- The command


def invoke(*args: str, **environ: str) -> Any:
    return CliRunner().invoke(main.app, list(args), env=environ)


def test_a_new_key_and_its_line_fit_together(tmp_path: Path) -> None:
    run = invoke("keys", "new", "--tenant", "a: 'b'", "--trusted", "--name", "ci")
    assert run.exit_code == 0
    key, line = run.stdout.splitlines()
    assert key not in line + run.stderr
    file = tmp_path / "keys.yaml"
    file.write_text(line + "\n" + invoke("keys", "new", "--tenant", "other").stdout.splitlines()[1] + "\n")
    assert Keyring(file).find(key) == ApiKey(digest_of(key), "a: 'b'", trusted=True, name="ci")
    assert [entry["tenant"] for entry in yaml.safe_load(file.read_text())] == ["a: 'b'", "other"]
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) >= 40
    assert invoke("keys", "new", "--tenant", "a" * 128).exit_code == 0
    assert invoke("keys", "new", "--tenant", "a" * 129).exit_code == 2
    assert invoke("keys", "new").exit_code == invoke("keys", "new", "--tenant", "").exit_code == 2


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What clients were built with."""
    made: list[dict[str, Any]] = []

    class Client:
        def __init__(self, address: str, **access: Any) -> None:
            made.append(access)

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_exc: object) -> None: ...

        def list_models(self, *_: Any, **__: Any) -> Any:
            raise Unauthenticated("an API key is needed")

        generate = explain = list_models

    for module in ("generate", "models", "explain"):
        monkeypatch.setattr(f"treeserve_cli.{module}.Client", Client)
    return made


def test_commands_bring_a_key_and_certificates(built: list[dict[str, Any]], tmp_path: Path) -> None:
    names = ("ca", "cert", "key")
    files = [tmp_path / name for name in names]
    for file in files:
        file.touch()
    flags = ["--api-key", KEY, *(part for n, f in zip(names, files, strict=True) for part in (f"--{n}-file", str(f)))]
    environ = {f"TREESERVE_{name.upper()}_FILE": str(f) for name, f in zip(names, files, strict=True)}
    environ["TREESERVE_API_KEY"] = KEY
    for command in (["models"], ["generate", "--prompt", "x"], ["explain", "r"]):
        for run in (invoke(*command, *flags), invoke(*command, **environ)):
            assert run.exit_code == 1
            assert "an API key is needed" in run.stderr
            assert KEY not in run.output
            assert built.pop() == {"api_key": KEY, "tls": TLS(*files)}
        invoke(*command)
        assert built.pop() == {}
    assert invoke("models", "--cert-file", str(files[1])).exit_code == 2
    assert invoke("models", "--ca-file", str(tmp_path / "nowhere")).exit_code == 2
    assert KEY not in invoke("models", "--help", **environ).output


# --- The local cluster


def test_a_local_cluster_speaks_tls_everywhere() -> None:
    files = TlsFiles(Path("c.crt"), Path("k.key"), Path("ca.crt"))
    text = "{cert_file: c.crt, key_file: k.key, ca_file: ca.crt}"
    config = load_config(ClusterConfig, [f"--tls={text}"], {})
    assert config.tls == files
    layout = Layout(Path("run"), Path("m"), ("127.0.0.1:1",), ("127.0.0.1:2",))
    kinds: dict[str, type[Any]] = {"verifier": VerifierConfig, "speculator": SpeculatorConfig, "router": RouterConfig}
    services = [spec for spec in process_specs(config, layout) if spec.role in kinds]
    assert [load_config(kinds[spec.role], spec.command[3:], {}).tls for spec in services] == [files] * 3
    plain = [spec for spec in process_specs(ClusterConfig(), layout) if spec.role in kinds]
    assert [load_config(kinds[spec.role], spec.command[3:], {}).tls for spec in plain] == [None] * 3


def test_a_cluster_that_wants_a_key_says_where_to_put_it() -> None:
    class Refusing:
        def list_models(self, **_: Any) -> None:
            raise Unauthenticated("an API key is needed")

    cluster = LocalCluster(ClusterConfig(grpc_port=0, http_port=0))
    with pytest.raises(ClusterError, match="set TREESERVE_API_KEY"):
        cluster._serves_model(Refusing())  # type: ignore[arg-type]


def test_file_lines_leave_out_what_is_not_so() -> None:
    assert "trusted" not in file_line(ApiKey(DIGEST, "acme", name="ci"))
