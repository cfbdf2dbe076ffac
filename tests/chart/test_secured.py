"""The chart with TLS and API keys: what is mounted where, which ports stay open, and what `helm test` brings."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from chart_manifests import MONITORING, ROLES, VARIANTS, Manifest, container, of_kind

from treeserve_wire.config import load_config
from treeserve_wire.tls import tls_from

TLS_FILES = ("cert_file", "key_file", "ca_file")


def config_text(manifests: list[Manifest], role: str) -> str:
    return of_kind(manifests, "ConfigMap")[role]["data"]["config.yaml"]


def mounted(pod_spec: dict[str, Any]) -> dict[str, str]:
    """Secrets by the folder they are mounted at."""
    (only,) = pod_spec["containers"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod_spec["volumes"] if "secret" in v}
    assert all("subPath" not in mount for mount in only["volumeMounts"])  # those see no changes
    return {m["mountPath"]: secrets[m["name"]] for m in only["volumeMounts"] if m["name"] in secrets}


def pod_spec(manifests: list[Manifest], role: str) -> dict[str, Any]:
    return of_kind(manifests, "Deployment")[role]["spec"]["template"]["spec"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("variant", ["tls", "secured"])
def test_every_role_is_told_of_the_mounted_certificate(rendered, variant, role):
    tls = tls_from(yaml.safe_load(config_text(rendered[variant], role))["tls"])
    assert tls is not None
    folders = {str(PurePosixPath(getattr(tls, name)).parent) for name in TLS_FILES}
    names = [PurePosixPath(getattr(tls, name)).name for name in TLS_FILES]
    assert names == ["tls.crt", "tls.key", "ca.crt"]  # a Secret of type kubernetes.io/tls, as cert-manager writes it
    assert folders <= {
        folder for folder, s in mounted(pod_spec(rendered[variant], role)).items() if s == "certificates"
    }
    service = of_kind(rendered[variant], "Service")["verifier"]
    assert tls.peer_name == f"{service['metadata']['name']}.serving.svc"


def test_only_routers_see_the_keys(rendered):
    for variant in ("keys", "secured"):
        for role in ROLES:
            config = yaml.safe_load(config_text(rendered[variant], role))
            secrets = set(mounted(pod_spec(rendered[variant], role)).values())
            assert ("api-keys" in secrets) == ("api_keys_file" in config) == (role == "router")
        folder = {s: f for f, s in mounted(pod_spec(rendered[variant], "router")).items()}["api-keys"]
        assert yaml.safe_load(config_text(rendered[variant], "router"))["api_keys_file"] == f"{folder}/keys.yaml"


def test_without_secrets_nothing_is_mounted_and_no_port_added(rendered):
    for role in ROLES:
        assert mounted(pod_spec(rendered["default"], role)) == {}
        assert (
            not {"tls", "health_listen", "api_keys_file"}
            & yaml.safe_load(config_text(rendered["default"], role)).keys()
        )
    assert {p["name"] for p in container(of_kind(rendered["default"], "Deployment")["router"])["ports"]} == {
        "grpc",
        "http",
    }


def test_prometheus_and_keda_ask_ports_that_need_no_key(render):
    scaled = {"verifier": {"autoscaling": {"enabled": True, "keda": {"enabled": True}}}}
    manifests = render(VARIANTS["secured"] | scaled, *MONITORING)
    router = yaml.safe_load(config_text(manifests, "router"))
    (endpoint,) = of_kind(manifests, "PodMonitor")["router"]["spec"]["podMetricsEndpoints"]
    ports = {p["name"]: p["containerPort"] for p in container(of_kind(manifests, "Deployment")["router"])["ports"]}
    assert router["metrics_listen"].endswith(f":{ports[endpoint['port']]}")
    address = of_kind(manifests, "ScaledObject")["verifier"]["spec"]["triggers"][0]["metadata"]["scalerAddress"]
    assert router["health_listen"].rpartition(":")[2] == address.rpartition(":")[2] == str(ports["health"])


def test_helm_test_brings_what_the_router_asks_for(rendered):
    (pod,) = [m for m in rendered["secured"] if m["kind"] == "Pod"]
    (only,) = pod["spec"]["containers"]
    environ = {variable["name"]: variable for variable in only["env"]}
    assert environ["TREESERVE_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "test-key", "key": "api-key"}
    (folder,) = mounted(pod["spec"])
    files = [environ[f"TREESERVE_{name}_FILE"]["value"] for name in ("CA", "CERT", "KEY")]
    assert files == [f"{folder}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")]
    router = of_kind(rendered["secured"], "Service")["router"]["metadata"]["name"]
    assert f"--address={router}.serving.svc:50051" in only["args"]  # a name that the certificate can carry
    (plain,) = [m for m in rendered["default"] if m["kind"] == "Pod"]
    assert "env" not in plain["spec"]["containers"][0]


def test_a_router_loads_the_secured_configuration(rendered, tmp_path):
    from treeserve_router.config import RouterConfig

    file = tmp_path / "config.yaml"
    file.write_text(config_text(rendered["secured"], "router"))
    config = load_config(RouterConfig, ["--config", str(file)], {})
    assert config.tls is not None
    assert config.require_client_certs
