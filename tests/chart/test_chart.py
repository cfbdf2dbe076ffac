"""The Helm chart: valid for Kubernetes 1.30 to 1.37, closed against typing errors, and in step with the services."""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from chart_manifests import CUSTOM_RESOURCES, MONITORING, ROLES, VARIANTS, Manifest, container, of_kind

from treeserve_core.sampling import ServiceClass
from treeserve_wire.config import load_config

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "treeserve"


def config_of(manifests: list[Manifest], role: str) -> dict[str, Any]:
    return yaml.safe_load(of_kind(manifests, "ConfigMap")[role]["data"]["config.yaml"])


def ports_of(manifests: list[Manifest], role: str) -> list[dict[str, Any]]:
    return container(of_kind(manifests, "Deployment")[role])["ports"]


def config_class(role: str) -> type:
    return getattr(importlib.import_module(f"treeserve_{role}.config"), f"{role.capitalize()}Config")


# --- The chart as Helm and Kubernetes see it


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_lint_is_clean(helm, variant):
    run = helm("lint", "--strict", str(CHART), values=VARIANTS[variant])
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_manifests_are_valid(rendered, version, monkeypatch):
    utils = kubernetes_validate.utils
    monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))  # each is megabytes of JSON
    distinct = {json.dumps(m, sort_keys=True): m for variant in rendered.values() for m in variant}
    ours = [m for m in distinct.values() if m["kind"] not in CUSTOM_RESOURCES]
    assert {m["kind"] for m in ours} >= {"Deployment", "Service", "HorizontalPodAutoscaler", "NetworkPolicy", "Pod"}
    assert {m["kind"] for m in ours} >= {"ServiceAccount", "Role", "RoleBinding"}
    for manifest in ours:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_the_validator_refuses_an_unknown_field(rendered):
    deployment = of_kind(rendered["default"], "Deployment")["router"]
    broken = {**deployment, "spec": {**deployment["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_every_role_has_its_objects(manifests):
    for kind in ("Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "PodMonitor"):
        assert set(of_kind(manifests, kind)) == set(ROLES), kind


def test_an_old_kubernetes_is_refused(helm):
    run = helm("template", "demo", str(CHART), "--kube-version", "1.29.0")
    assert run.returncode != 0
    assert "kubeVersion" in run.stderr


def test_monitors_need_the_operator_and_the_flag(render):
    assert not of_kind(render({}), "PodMonitor")
    assert not of_kind(render({"podMonitor": {"enabled": False}}, *MONITORING), "PodMonitor")


def test_notes_say_what_is_missing(helm):
    run = helm("install", "demo", str(CHART), "--dry-run=client", "--namespace", "serving")
    assert run.returncode == 0, run.stderr
    notes = run.stdout.partition("NOTES:")[2]
    assert "demo-treeserve-router.serving.svc" in notes
    assert "model.existingClaim is empty" in notes


def test_the_longest_release_name_fits(render):
    manifests = render({}, release="r" * 53)
    assert all(len(m["metadata"]["name"]) <= 63 for m in manifests if m["kind"] in ("Service", "Deployment"))


# --- Values


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 3}, "replicas"),
        ({"router": {"replica": 3}}, "replica"),
        ({"router": {"replicas": 0}}, "/router/replicas"),
        ({"router": {"config": {"listen": "0.0.0.0:1"}}}, "listen"),
        ({"router": {"config": {"qos": {"gold": {}}}}}, "gold"),
        ({"router": {"config": {"qos": {"batch": {"weight": 0}}}}}, "/router/config/qos/batch/weight"),
        ({"router": {"config": {"tenants": {"acme": {"tokens": 5}}}}}, "tokens"),
        ({"verifier": {"config": {"dtype": "float16"}}}, "/verifier/config/dtype"),
        ({"verifier": {"config": {"kv_tokens": "many"}}}, "/verifier/config/kv_tokens"),
        ({"verifier": {"gpu": {"count": -1}}}, "/verifier/gpu/count"),
        ({"verifier": {"sharedMemory": "lots"}}, "/verifier/sharedMemory"),
        ({"verifier": {"autoscaling": {"podMetric": {"name": "queue"}}}}, "/verifier/autoscaling/podMetric/target"),
        ({"verifier": {"autoscaling": {"keda": {"enabled": "yes"}}}}, "/verifier/autoscaling/keda/enabled"),
        ({"router": {"config": {"streams_per_router": 0}}}, "/router/config/streams_per_router"),
        ({"speculator": {"config": {"sources": ["Not A Source"]}}}, "/speculator/config/sources"),
        ({"speculator": {"resources": {"requests": {"cpu": None}}}}, "/speculator/resources/requests"),
        ({"speculator": {"tolerations": [{"effect": "Never"}]}}, "/speculator/tolerations/0/effect"),
        ({"model": {"path": "../model"}}, "/model/path"),
        ({"discovery": "consul"}, "/discovery"),
        ({"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts"),
        ({"networkPolicy": {"apiServerPorts": [70000]}}, "/networkPolicy/apiServerPorts/0"),
        ({"redis": {"url": "valkey:6379"}}, "/redis/url"),
        ({"tls": {"secretName": "No Name"}}, "/tls/secretName"),
        ({"auth": {"keys": "a-key"}}, "keys"),
        ({"drain": {"seconds": "30s"}}, "/drain/seconds"),
        ({"networkPolicy": {"clientNamespaces": ["No Namespace"]}}, "/networkPolicy/clientNamespaces/0"),
        ({"router": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 4}}}, "router.autoscaling"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm, values, named):
    run = helm("template", "demo", str(CHART), values=values)
    assert run.returncode != 0
    assert named in run.stderr


def test_the_schema_is_closed_everywhere():
    def open_objects(node: Any, path: str) -> list[str]:
        if isinstance(node, list):
            return [name for i, item in enumerate(node) for name in open_objects(item, f"{path}/{i}")]
        if not isinstance(node, dict):
            return []
        found = [path] if node.get("type") == "object" and "additionalProperties" not in node else []
        return found + [name for key, item in node.items() for name in open_objects(item, f"{path}/{key}")]

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert open_objects(schema, "") == ["/properties/global"]  # Helm's own, not read by the chart


# --- In step with the services

# What the chart sets by itself; every other field of a service's configuration is a value of the chart.
OWNED = {"model_folder", "model_name", "listen", "http_listen", "metrics_listen", "verifiers", "redis_url", "threads"}
OWNED |= {"device", "drain_s", "log_level", "otlp_endpoint", *(f"{role}_id" for role in ROLES)}
OWNED |= {"tls", "health_listen", "api_keys_file"}
FOR_TESTS = {"draft_always"}


@pytest.mark.parametrize("role", ROLES)
def test_a_config_file_holds_fields_of_its_service(manifests, role):
    known = {field.name for field in fields(config_class(role))}
    required = {f.name for f in fields(config_class(role)) if f.default is MISSING and f.default_factory is MISSING}
    assert required <= set(config_of(manifests, role)) <= known


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_of_a_service_is_a_value(role):
    schema = json.loads((CHART / "values.schema.json").read_text())
    settings = set(schema["properties"][role]["properties"]["config"]["properties"])
    assert settings == {field.name for field in fields(config_class(role))} - OWNED - FOR_TESTS


@pytest.mark.parametrize("role", ROLES)
def test_a_service_accepts_its_configuration(manifests, role, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(of_kind(manifests, "ConfigMap")[role]["data"]["config.yaml"])
    fetched = {"resourceFieldRef": "4", "fieldRef": "pod-1", "secretKeyRef": "secret"}  # what a kubelet would fill in
    environ = {
        variable["name"]: variable.get("value") or fetched[next(iter(variable["valueFrom"]))]
        for variable in container(of_kind(manifests, "Deployment")[role])["env"]
    }
    config = load_config(config_class(role), ["--config", str(file)], environ)
    assert getattr(config, f"{role}_id") == "pod-1"
    assert config.model_name == "SmolLM2-135M-Instruct"
    settings = {name.removeprefix("TREESERVE_").lower() for name in environ if name.startswith("TREESERVE_")}
    assert settings <= {field.name for field in fields(config_class(role))}


def load_router(content: dict[str, Any], folder: Path) -> Any:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_config(config_class("router"), ["--config", str(file)], {})


def test_settings_arrive_with_their_types(rendered, tmp_path):
    verifier = config_of(rendered["everything"], "verifier")
    assert (verifier["kv_tokens"], verifier["draft_wait_ms"], verifier["reflection"]) == (3_000_000, 2.5, False)
    assert type(verifier["kv_tokens"]) is int
    assert verifier["device"] == "cuda"
    assert "device" not in config_of(rendered["default"], "verifier")
    assert config_of(rendered["everything"], "speculator")["sources"] == ["ngram", "ssm"]
    router = load_router(config_of(rendered["everything"], "router"), tmp_path)
    assert (router.qos[ServiceClass.REALTIME].ttft_ms, router.qos[ServiceClass.STANDARD].ttft_ms) == (250, None)
    assert (router.tenants["acme"].weight, router.tenants["acme"].tokens_per_minute) == (2.5, 1e6)


def test_routers_and_speculators_find_every_verifier(rendered):
    for variant, manifests in rendered.items():
        service = of_kind(manifests, "Service")["verifier"]
        assert service["spec"]["clusterIP"] == "None"  # headless: the name resolves to pods
        (grpc,) = [port for port in service["spec"]["ports"] if port["name"] == "grpc"]
        assert grpc["port"] == {p["name"]: p["containerPort"] for p in ports_of(manifests, "verifier")}["grpc"]
        name = service["metadata"]["name"]
        watched = VARIANTS[variant].get("discovery") == "kubernetes"
        address = f"kubernetes://serving/{name}" if watched else f"dns://{name}.serving.svc"
        for role in ("router", "speculator"):
            assert config_of(manifests, role)["verifiers"] == [f"{address}:{grpc['port']}"]


def test_a_changed_configuration_replaces_only_the_pods_it_concerns(render, rendered):
    def checksums(manifests: list[Manifest]) -> dict[str, str]:
        deployments = of_kind(manifests, "Deployment").items()
        return {role: d["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for role, d in deployments}

    before, after = checksums(rendered["default"]), checksums(render({"verifier": {"config": {"max_nodes": 8}}}))
    assert {role for role in ROLES if before[role] != after[role]} == {"verifier"}


def test_the_helm_test_is_a_command_line_that_the_cli_accepts(rendered):
    from treeserve_cli.main import app

    (pod,) = [m for m in rendered["default"] if m["kind"] == "Pod"]
    (only,) = pod["spec"]["containers"]
    program, command, *rest = only["command"] + only["args"]
    assert program == "treeserve"
    generate = typer.main.get_command(app).commands[command]
    options = generate.make_context(command, rest, resilient_parsing=False).params  # raises for an unknown option
    service = of_kind(rendered["default"], "Service")["router"]["metadata"]["name"]
    assert f"{service}:50051" in options.values()
